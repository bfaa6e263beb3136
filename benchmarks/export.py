"""Token export against the plain loop it replaces, and against the training step it must not slow down.

The loop is what exporters in use do: each tensor to a Python list, each float looked at, `json.dumps`, and the file
opened again for every record.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data import step_of_groups
from benchmarks.report import Row, best, faster, smaller
from penstock.arrays import Samples
from penstock.packing import MicroBatch, pack
from penstock.train.terms import Terms
from penstock.view.batch_records import BatchCopy
from penstock.view.export import TokenExporter
from penstock.view.jsonl import Jsonl
from penstock.view.parquet import ParquetFile
from penstock.view.reader import Export
from penstock.view.record import filled
from penstock.view.step_files import Format
from penstock.view.tallies import tally
from tests.support.exports import terms_of

_Fed = list[tuple[MicroBatch, Terms]]


def run(*, full: bool, progress: Callable[[str], None]) -> list[Row]:
    progress("making a step")
    rng = np.random.default_rng(7)
    samples = Samples.of(step_of_groups(rng, groups=16 if full else 4))
    step = pack(samples, ranks=1, seq_len=16_384, micro_batch_max_tokens=16_384)
    fed = [(batch, terms_of(rng, batch)) for batch in step.ranks[0]]
    tokens = sum(batch.num_tokens for batch, _ in fed)
    folder = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    try:
        return [*_speed(folder, fed, tokens, progress), *_sizes(folder, tokens), _share(folder, progress)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _speed(folder: Path, fed: _Fed, tokens: int, progress: Callable[[str], None]) -> list[Row]:
    progress(f"exporting {tokens:,} tokens")
    fresh = (folder / f"jsonl-{i}" for i in count())
    ours, arrow, loop = best(
        lambda: _export(next(fresh), fed),
        lambda: _export(folder / "parquet", fed, ParquetFile),
        lambda: plain_loop(folder / "loop.jsonl", fed),
        repeats=7,
    )
    progress("copying, as the training thread does, and reading back")
    copying, reading, loads = best(
        lambda: [BatchCopy.of(batch, terms) for batch, terms in fed],
        lambda: tally(Export(folder / "jsonl-0").step(1).records()),
        lambda: plain_read(folder / "loop.jsonl"),
        repeats=3,
    )
    rate = f"{tokens / ours / 1e6:.2f} Mtok/s, synced to disk and summarized"
    return [
        faster("export as JSONL", ours, loop, "plain json loop", target=20.0, note=rate),
        faster("export as Parquet", arrow, loop, "plain json loop"),
        faster("on the training thread alone", copying, loop, "plain json loop"),
        faster("read back and summarize", reading, loads, "json.loads and loops"),
    ]


def _sizes(folder: Path, tokens: int) -> list[Row]:
    def size(name: str) -> float:
        return (
            sum(
                path.stat().st_size
                for path in (folder / name).rglob("rank_0.*")
                if path.suffix in (".jsonl", ".parquet")
            )
            / tokens
        )

    loop = (folder / "loop.jsonl").stat().st_size / tokens
    return [
        smaller("JSONL per token", size("jsonl-0"), loop, "plain json loop", unit="B"),
        smaller("Parquet per token", size("parquet"), loop, "plain json loop", unit="B"),
    ]


def _export(folder: Path, fed: _Fed, file_format: Format = Jsonl) -> None:
    with TokenExporter(folder, file_format=file_format) as exporter:
        for batch, terms in fed:
            exporter.write(1, batch, terms)
        exporter.close_step(1)


def plain_loop(path: Path, fed: _Fed) -> None:
    """The same records, element by element."""
    path.unlink(missing_ok=True)
    for batch, terms in fed:
        for record in BatchCopy.of(batch, terms).records({"step": 1, "rank": 0, "micro_step": 0}, None):
            fields: dict[str, Any] = dict(record.fields)
            for name, values in filled(record).items():
                fields[name] = [_plain(value) for value in values.tolist()]
            with path.open("a") as file:
                file.write(json.dumps(fields, allow_nan=False, separators=(",", ":")) + "\n")


def _plain(value: float) -> float | None:
    if isinstance(value, int):
        return value
    return float(value) if math.isfinite(value) else None


def plain_read(path: Path) -> tuple[float, float]:
    """Mean mismatch KL and entropy, element by element."""
    sums, counts = [0.0, 0.0], [0, 0]
    with path.open() as file:
        for line in file:
            record = json.loads(line)
            for i, name in enumerate(("mismatch_kl", "entropy")):
                for value, trained in zip(record[name], record["loss_mask"], strict=True):
                    if trained and value is not None:
                        sums[i] += value
                        counts[i] += 1
    return sums[0] / max(counts[0], 1), sums[1] / max(counts[1], 1)


def _share(folder: Path, progress: Callable[[str], None]) -> Row:
    """The share of a training step's time that export adds, for the smallest model worth calling one."""
    name = "share of a training step"
    try:
        import torch
    except ImportError:
        return Row(name=name, ours=math.nan, unit="%", note="skipped: torch is not installed")
    from benchmarks.tiny import TinyLm, train

    progress("training a 2-layer model with and without export")
    torch.set_num_threads(1)
    rng = np.random.default_rng(1)
    samples = step_of_groups(rng, groups=1, size=4)
    step = pack(samples, ranks=1, seq_len=1024, micro_batch_max_tokens=1024)
    model, batches = TinyLm(), list(step.ranks[0])[:2]
    plain, extra = math.inf, math.inf
    with TokenExporter(folder / "share") as exporter:
        train(model, batches)
        for number in range(1, 4):
            begin = time.process_time()
            fed = train(model, batches)
            plain = min(plain, time.process_time() - begin)
            begin = time.process_time()  # of all threads: what the writer does counts too
            for batch, terms in fed:
                exporter.write(number, batch, terms)
            exporter.close_step(number)
            exporter.flush()
            extra = min(extra, time.process_time() - begin)
    tokens = sum(batch.num_tokens for batch in batches)
    note = f"{plain * 1e3:.0f} ms for {tokens} tokens of a model with {model.num_parameters / 1e6:.1f} M parameters"
    return Row(name=name, ours=100 * extra / plain, unit="%", target=5.0, bound="max", note=note)
