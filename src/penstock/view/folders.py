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
from typing import Any

import msgspec

from penstock.atomic import rename, replacing, sync
from penstock.errors import ConfigError, StorageError

EXPORTS = "token_exports"
STABLE = "STABLE"
_STEP = re.compile(r"step_(\d{1,18})")
_SAFE_RUN = re.compile(r"(?![.-])[A-Za-z0-9_.-]{1,128}")


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's word that its part of a step is on disk."""

    rank: int
    world: int
    attempt: str
    """The life of the run that wrote it; STABLE needs the same on every rank."""
    file: str = ""
    num_bytes: int = 0
    digest: str = ""
    """xxh3-128 of the file."""
    records: int = 0
    skipped: int = 0
    """Records left out by sampling or by the size limit."""
    seconds: float | None = None
    """Since this rank closed the step before."""
    summary: dict[str, Any] = {}
    """Over all sequences of the step on this rank, exported or not."""
    micro_batches: list[dict[str, Any]] = []
    metrics: dict[str, float] = {}
    """Whatever the training loop gave."""


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
    """Write a rank's marker atomically."""
    with replacing(path / f"rank_{done.rank}.done") as file:
        file.write(msgspec.json.format(msgspec.json.encode(done), indent=1))


def read_done(path: Path, rank: int) -> Done | None:
    """A rank's marker; None where there is none that can be read."""
    try:
        return msgspec.json.decode((path / f"rank_{rank}.done").read_bytes(), type=Done)
    except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


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
