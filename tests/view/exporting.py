"""Samples, their micro-batches and what was exported of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.arrays import Sample
from penstock.packing import MicroBatch, pack
from penstock.train.terms import Terms
from penstock.view import TokenExporter


def sample(name: str, count: int, **more: Any) -> Sample:
    mask = [False] + [True] * (count - 1)
    return Sample(id=name, token_ids=range(count), loss_mask=mask, logprobs=[-0.5] * count, advantages=1.0, **more)


def batch_of(*samples: Sample, pad_to: int = 1) -> MicroBatch:
    return pack(
        samples, ranks=1, seq_len=64, micro_batch_max_tokens=4096, long_rows=True, pad_to_multiple_of=pad_to
    ).ranks[0][0]


def terms_for(batch: MicroBatch, **more: Any) -> Terms:
    return Terms(loss=np.zeros(batch.num_tokens), trainer_logprobs=np.full(batch.num_tokens, -0.25), **more)


def lines_of(folder: Path, step: int = 1, rank: int = 0) -> list[dict[str, Any]]:
    text = (folder / f"token_exports/step_{step}/rank_{rank}.jsonl").read_text()
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


def export(folder: Path, *batches: MicroBatch, step: int = 1, **options: Any) -> None:
    with TokenExporter(folder, **options) as exporter:
        for batch in batches:
            exporter.write(step, batch, terms_for(batch), policy_version=7)
        exporter.close_step(step)
