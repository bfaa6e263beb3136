"""Where exports lie, and the order of writes by which a finished step can be told from a half-written one.

    <folder>/token_exports/step_12/rank_0.jsonl      records of one rank; appears whole, or not at all
    <folder>/token_exports/step_12/rank_0.done       that rank has synced its file: count, size, digest, summary
    <folder>/token_exports/step_12/STABLE            every rank has; empty
    <folder>/<run>/token_exports/...                 the same for a named run

A file grows as `.rank_0.jsonl.part`, is synced, then renamed; its marker follows, then STABLE. Before a step is
written again, after a restart, its STABLE and this rank's marker go first; the finished file of the attempt before
stays beside the new one as `rank_0.jsonl.1`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from penstock.atomic import folder_errors, rename, replacing, sync
from penstock.errors import ConfigError, CorruptFile, StorageError
from penstock.view.tally import Count, Summary

EXPORTS = "token_exports"
STABLE = "STABLE"
_MARKER = re.compile(r"rank_(\d{1,9})\.done")
_STEP = re.compile(r"step_(\d{1,18})")
_SAFE_RUN = re.compile(r"(?![.-])[A-Za-z0-9_.-]{1,128}")


class PackedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """How a micro-batch was packed; what the step page draws."""

    step: Count
    micro_step: Count
    tokens: Count
    """Computed, padding included."""
    padding: Count
    samples: list[Count]
    """Tokens of each."""
    modality: str
    is_dummy: bool


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's word that its part of a step is on disk."""

    rank: Count
    world: Count
    attempt: str
    """The life of the run that wrote it; STABLE needs the same on every rank."""
    file: str = ""
    num_bytes: Count = 0
    digest: str = ""
    """xxh3-128 of the file."""
    records: Count = 0
    skipped: Count = 0
    """Records left out by sampling or by the size limit."""
    seconds: float | None = None
    """From the end of the trainer's step before this one; None where that is not known."""
    summary: Summary | None = None
    """Over all sequences of the step on this rank, exported or not."""
    micro_batches: list[PackedBatch] = []
    metrics: dict[str, float | None] = {}
    """Whatever the training loop gave; None for what was not a number."""


# Made at import: msgspec crashes when two threads are the first to decode a type.
_READ = msgspec.json.Decoder(Done)


def exports_of(folder: Path, run: str) -> Path:
    """The exports of a run; `run` is "" where there is only one."""
    if run and not _SAFE_RUN.fullmatch(run):
        raise ConfigError(f"run {run[:80]!r}: cannot name a folder; give 1 to 128 of A-Z a-z 0-9 _ . -")
    return folder / run / EXPORTS if run else folder / EXPORTS


def step_folder(folder: Path, run: str, step: int) -> Path:
    return exports_of(folder, run) / f"step_{step}"


def step_number(path: Path) -> int | None:
    """The number in a step folder's name; None for any other folder."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def make_folder(path: Path) -> None:
    """Make it; a shared filesystem may say it exists although that was allowed."""
    with folder_errors(path):
        try:
            path.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            if not path.is_dir():
                raise StorageError(f"{path}: exists and is not a folder; move it away") from None


def reopen(path: Path, rank: int) -> None:
    """Before a step is written: nothing of an attempt before may call it finished."""
    make_folder(path)
    for name in (STABLE, f"rank_{rank}.done"):
        with suppress(FileNotFoundError):
            (path / name).unlink()
            sync(path)


def publish(part: Path, final: Path) -> None:
    """Give a synced file its name; what had that name stays beside it under a number."""
    if final.exists():
        numbers = (n for n in range(1, 1 << 30) if not Path(f"{final}.{n}").exists())
        os.link(final, f"{final}.{next(numbers)}")
    rename(part, final)


def write_done(path: Path, done: Done) -> None:
    """Write a rank's marker atomically; one that could not be read back is not written, it raises."""
    marker = path / f"rank_{done.rank}.done"
    data = msgspec.json.format(msgspec.json.encode(done), indent=1)
    _decoded(data, marker, done.rank)
    with replacing(marker) as file:
        file.write(data)


def read_done(path: Path, rank: int) -> Done | None:
    """A rank's marker; None where there is none."""
    marker = path / f"rank_{rank}.done"
    try:
        return _decoded(marker.read_bytes(), marker, rank)
    except FileNotFoundError:
        return None


def _decoded(data: bytes, marker: Path, rank: int) -> Done:
    try:
        done = _READ.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptFile(
            f"{marker}: not a rank's marker: {error}; export the step again or remove its folder"
        ) from None
    # The name is checked because it is opened: a marker leads to its rank's file and to no other.
    if done.rank != rank or not re.fullmatch(rf"rank_{rank}\.\w{{1,16}}", done.file, re.ASCII):
        raise CorruptFile(f"{marker}: says rank {done.rank}, file {done.file[:80]!r}; export the step again")
    return done


def marked_ranks(path: Path) -> list[int]:
    """Ranks that have a marker in a step's folder."""
    return sorted(int(match[1]) for one in path.iterdir() if (match := _MARKER.fullmatch(one.name)))


def all_done(path: Path, attempt: str, world: int) -> bool:
    """Whether every rank of this attempt has finished."""
    marks = (read_done(path, rank) for rank in range(world))
    return all(mark is not None and (mark.attempt, mark.world) == (attempt, world) for mark in marks)


def promote(path: Path) -> None:
    """Call the step finished; any number of ranks may do so at once."""
    (path / STABLE).touch()
    sync(path)


def steps_in(exports: Path) -> Iterator[tuple[int, Path]]:
    """Step folders, by number."""
    found = [(number, path) for path in exports.glob("step_*") if (number := step_number(path)) is not None]
    return iter(sorted(found))
