"""Read exports: runs, finished steps, records. Unreadable lines are counted and skipped.

Needs no torch. A step is visible once it is marked STABLE. Only files of ranks named by its markers are read, so that
leftovers of an earlier attempt with more ranks are not mixed in. For exports without markers, every rank's file is
read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import xxhash

from penstock.atomic import open_file
from penstock.errors import CorruptFile, InvalidInput, UnknownKey
from penstock.view.folders import (
    EXPORTS,
    STABLE,
    Done,
    exports_of,
    marked_ranks,
    read_done,
    run_of,
    step_folder,
    steps_in,
)
from penstock.view.jsonl import MalformedLine, encode_line, parse_line
from penstock.view.plane_steps import EVALUATION, PlaneStep, PlaneSteps, evaluation_steps
from penstock.view.record import ReadLine, Record, Skipped, Step

MAX_LINE_BYTES = 1 << 30
"""Longer lines are skipped unread. 5 million tokens take about half of it."""
_RANK_FILE = re.compile(r"rank_(\d{1,9})\.(jsonl|parquet)")


class Export:
    """The exports below a folder, of one run or several, and the evaluation groups of its plane.

    Without exports, the steps are those of its plane.

    The folder may be that of a run, of several runs, of a plane, or a `token_exports` folder. With `awaited` it may be
    that of a run that has not exported anything yet.
    """

    def __init__(self, folder: str | Path, *, awaited: bool = False) -> None:
        self.folder = Path(folder)
        if self.folder.name == EXPORTS:
            self.folder = self.folder.parent
        try:
            is_folder = self.folder.is_dir()
        except OSError:  # a name that is too long
            is_folder = False
        if not is_folder:
            raise InvalidInput(f"{self.folder}: not a folder; give the folder of a run, or of TokenExporter")
        self._plane = PlaneSteps(self.folder)
        if not awaited and not self.runs:
            raise InvalidInput(
                f"{self.folder}: no token_exports in it, and no plane with a step; give the folder of a run, or of "
                "TokenExporter"
            )

    @property
    def runs(self) -> list[str]:
        """Names of runs with steps: "" for the folder itself, `EVALUATION` for evaluation groups."""
        return [*self._trained, *([EVALUATION] if evaluation_steps(self.folder) else [])]

    @property
    def _trained(self) -> list[str]:
        return self._exported or [""] * bool(self._plane.all())

    @property
    def is_plane(self) -> bool:
        """Whether steps come from the plane, because nothing is exported."""
        return not self._exported and bool(self._plane.all())

    def logged(self) -> list[PlaneStep]:
        """Return all steps of the plane, also those that can no longer be opened."""
        return self._plane.all()

    @property
    def _exported(self) -> list[str]:
        named = sorted(run_of(path.parent.name) for path in self.folder.glob(f"*/{EXPORTS}") if path.is_dir())
        return [""] * (self.folder / EXPORTS).is_dir() + named

    def steps(self, run: str | None = None, *, after: int = -1) -> Sequence[Step]:
        """Return the finished steps of a run after step `after`, oldest first."""
        run = self.choose(run)
        if run == EVALUATION:
            return [step for step in evaluation_steps(self.folder) if step.number > after]
        if not self._exported:
            return [step for step in self._plane.kept() if step.number > after]
        found = (StepFolder(number=number, run=run, path=path) for number, path in steps_in(self._exports(run)))
        return [step for step in found if step.number > after and step.is_stable]

    def step(self, number: int, run: str | None = None) -> Step:
        """Return one finished step. The error of a missing one lists those there are."""
        run = self.choose(run)
        if run != EVALUATION:
            # Look at one folder: listing all steps for every click on a sample would cost more the longer a run is.
            step = StepFolder(number=number, run=run, path=step_folder(self.folder, run, number))
            if step.is_stable:
                return step
        steps = {step.number: step for step in self.steps(run)}
        if number not in steps:
            have = ", ".join(map(str, list(steps)[-8:])) or "none yet"
            raise UnknownKey(f"{self.folder}: no finished step {number}; the last finished ones: {have}")
        return steps[number]

    def _exports(self, run: str) -> Path:
        return exports_of(self.folder, run)

    def _has_exports(self, run: str) -> bool:
        """Return whether a named run has exports, without listing the other runs or opening the plane's log."""
        return self._exports(run).is_dir()

    def choose(self, run: str | None) -> str:
        """Return the requested run, or the only trained one. Raises with their names if there are several."""
        if run is None:
            runs = self._trained or self.runs or [""]
            if len(runs) > 1:
                listed = ", ".join(repr(name) if name else "'' (the folder's own)" for name in runs)
                raise InvalidInput(f"{self.folder}: {len(runs)} runs, {listed}; choose one with run= (--run)")
            return runs[0]
        if run and not self._has_exports(run) and run not in (runs := self.runs):
            named = ", ".join(repr(name) for name in runs if name) or "only the folder's own; leave the run out"
            raise UnknownKey(f"{self.folder}: no run {run[:80]!r}; there are {named}")
        return run


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFolder(Step):
    """A step that ranks exported."""

    number: int
    run: str
    path: Path

    @property
    def is_stable(self) -> bool:
        return (self.path / STABLE).exists()

    @property
    def stamp(self) -> int:
        return (self.path / STABLE).stat().st_mtime_ns

    def done(self) -> dict[int, Done]:
        first = read_done(self.path, 0)
        if first is None:
            return {}
        marks = {rank: read_done(self.path, rank) for rank in marked_ranks(self.path) if rank < first.world}
        return {rank: mark for rank, mark in marks.items() if mark is not None}

    def files(self) -> dict[int, Path]:
        done = self.done()
        if done:
            return {rank: self.path / mark.file for rank, mark in done.items()}
        matches = ((_RANK_FILE.fullmatch(path.name), path) for path in sorted(self.path.iterdir()))
        return {int(match[1]): path for match, path in matches if match}

    def lines(self, skipped: Skipped) -> Iterator[tuple[ReadLine, Record]]:
        for path in self.files().values():
            yield from _lines(path, skipped)

    def altered(self) -> list[str]:
        return [mark.file for mark in self.done().values() if _digest(self.path / mark.file) != mark.digest]


def read_file(path: Path, skipped: Skipped | None = None) -> Iterator[Record]:
    """Yield the records of one file."""
    return (record for _, record in _lines(path, skipped or Skipped()))


def _lines(path: Path, skipped: Skipped) -> Iterator[tuple[ReadLine, Record]]:
    if path.suffix == ".parquet":
        from penstock.view.parquet import read_parquet

        for row, record in enumerate(read_parquet(path)):
            yield partial(_parquet_line, path, row), record
        return
    for number, offset, line in numbered_lines(path, skipped):
        try:
            record = parse_line(line)
        except MalformedLine as error:
            skipped.add(f"{path.name}:{number}", error)
            continue
        yield partial(_jsonl_line, path, offset, len(line)), record


def _parquet_line(path: Path, row: int) -> bytes:
    from penstock.view.parquet import read_parquet

    return next(encode_line(record) for number, record in enumerate(read_parquet(path)) if number == row)


def _jsonl_line(path: Path, offset: int, num_bytes: int) -> bytes:
    with open_records(path) as file:
        file.seek(offset)
        return file.read(num_bytes)


def open_records(path: Path) -> BinaryIO:
    """Open a rank's file. Raises CorruptFile if a marker names a file that is gone."""
    try:
        return open_file(path)
    except FileNotFoundError:
        raise CorruptFile(f"{path}: missing, although its marker names it; export the step again") from None
    except OSError as error:
        raise CorruptFile(f"{path}: {error.strerror}; export the step again") from None


def numbered_lines(path: Path, skipped: Skipped) -> Iterator[tuple[int, int, bytes]]:
    """Yield number (from 1), offset and bytes of each line that is not empty and not too long."""
    with open_records(path) as file:
        offset, number = 0, 0
        while line := file.readline(MAX_LINE_BYTES):
            number += 1
            start, offset = offset, offset + len(line)
            if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                offset += _skip_line(file)
                skipped.add(f"{path.name}:{number}", f"longer than {MAX_LINE_BYTES} bytes")
            elif line.strip():
                yield number, start, line


def _skip_line(file: BinaryIO) -> int:
    skipped = 0
    while rest := file.readline(1 << 20):
        skipped += len(rest)
        if rest.endswith(b"\n"):
            break
    return skipped


def _digest(path: Path) -> str:
    state = xxhash.xxh3_128()
    try:
        with open_file(path) as file:
            while block := file.read(1 << 20):
                state.update(block)
    except FileNotFoundError:
        return ""
    return state.hexdigest()
