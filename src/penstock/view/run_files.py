"""The files a run writes about itself: metrics of every step, and whether it is running.

`metrics.jsonl` has one line per step from the trainer. `plane.jsonl` has what the plane held, accepted and dropped when
the step was trained. They are read incrementally. A step trained again after a crash counts with its last line.

`state.json` is written when a run starts and when it ends. A killed run cannot write that it ended; its process id
shows it, on the same machine.
"""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

from penstock.atomic import open_file, read_small, replacing
from penstock.log import is_gone, pid_space

STATE = "state.json"
FILES = ("metrics.jsonl", "plane.jsonl")
_MAX_READ = 64 << 20
"""Bytes of a file read at a time."""
_TAIL = 256 << 10
Places = dict[str, int]
"""How far each file has been read."""


def is_written(folder: Path) -> bool:
    """Return whether a run writes its metrics there."""
    return any((folder / name).is_file() for name in FILES)


def rows_since(folder: Path, places: Places) -> tuple[list[dict[str, float | None]], Places]:
    """Return lines added since `places`, merged and sorted by step, and the places to continue from."""
    rows: list[dict[str, float | None]] = []
    now = dict(places)
    for name in FILES:
        found, now[name] = new_rows(folder / name, places.get(name, 0))
        rows += found
    return merged(rows), now


def merged(rows: Iterable[Mapping[str, float | None]]) -> list[dict[str, float | None]]:
    """Merge the rows of each step, sorted by step. If a step was trained again, its last line counts."""
    found: dict[int, dict[str, float | None]] = {}
    for row in rows:
        found.setdefault(int(row["step"] or 0), {}).update(row)
    return [found[step] for step in sorted(found)]


def new_rows(path: Path, start: int) -> tuple[list[dict[str, float | None]], int]:
    """Return the rows of a file after byte `start`, and where to continue."""
    lines, end = _lines(path, start)
    return [row for line in lines if (row := _row(line)) is not None], end


def rows_in(path: Path) -> list[dict[str, float | None]]:
    """Return the last rows of a file of metrics, as many as a quarter of a megabyte holds."""
    return [row for line in last_lines(path) if (row := _row(line)) is not None]


def last_lines(path: Path) -> list[bytes]:
    """Return the lines in the last quarter of a megabyte of a file. The first one may be cut. None if it is absent."""
    try:
        return _lines(path, max(path.stat().st_size - _TAIL, 0))[0]
    except OSError:
        return []


def as_columns(rows: Iterable[Mapping[str, float | None]]) -> dict[str, list[float | None]]:
    """Convert rows to one list per name, null where a step lacks it. A third of the bytes of a list of rows."""
    kept = list(rows)
    names = dict.fromkeys(name for row in kept for name in row)
    return {name: [row.get(name) for row in kept] for name in names}


def _lines(path: Path, start: int) -> tuple[list[bytes], int]:
    try:
        with open_file(path) as file:
            size = file.seek(0, 2)
            begin = start if start <= size else 0  # the file was replaced by a new one
            file.seek(begin)
            data = file.read(_MAX_READ)
    except FileNotFoundError:
        return [], 0
    end = data.rfind(b"\n") + 1  # a line still being written is read next time
    return data[:end].splitlines(), begin + end


def _row(line: bytes) -> dict[str, float | None] | None:
    """Return the numbers in a line. None for a line without a step, such as one cut off by a crash."""
    try:
        found: Any = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    step: Any = found.get("step") if isinstance(found, dict) else None
    if not _is_number(step) or not 0 <= step < 2**53:
        return None
    return {str(name)[:120]: value for name, value in found.items() if value is None or _is_number(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run, as it wrote it."""

    state: Literal["running", "finished", "stopped", "failed", "gone"]
    """gone: its process ended without writing its state."""
    began: float
    ended: float | None = None
    pid: int = 0
    host: str = ""
    earlier_s: float = 0.0
    """Seconds that earlier starts of the run took."""
    of: str = "run"
    """"plane" if this is only the state of the run's plane, from its log."""

    @property
    def seconds(self) -> float:
        """How long the run has run, over all its starts."""
        return self.earlier_s + max((self.ended or time.time()) - self.began, 0.0)


# Made at import: msgspec crashes when two threads are the first to decode a type.
_READ_STATE = msgspec.json.Decoder(RunState)


@contextmanager
def at_work(folder: Path) -> Iterator[None]:
    """Write that the run in a folder is running, and at the end how it ended."""
    before = state_of(folder)
    earlier = 0.0 if before is None or before.ended is None else before.seconds
    running = RunState(state="running", began=time.time(), pid=os.getpid(), host=platform.node(), earlier_s=earlier)
    _write(folder, running)
    outcome: Literal["finished", "stopped", "failed"] = "failed"
    try:
        yield
        outcome = "finished"
    except KeyboardInterrupt:
        outcome = "stopped"
        raise
    finally:
        _write(folder, msgspec.structs.replace(running, state=outcome, ended=time.time()))


def state_of(folder: Path) -> RunState | None:
    """Read the state of the run in a folder, None if unknown."""
    try:
        found = _READ_STATE.decode(read_small(folder / STATE))
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if found.state == "running" and found.host == platform.node() and is_gone(pid_space(), found.pid):
        return msgspec.structs.replace(found, state="gone", ended=last_written(folder) or found.began)
    return found


def last_written(folder: Path) -> float | None:
    """Return when a run wrote metrics last, None if it wrote none."""
    found = []
    for name in FILES:
        with suppress(OSError):
            found.append((folder / name).stat().st_mtime)
    return max(found, default=None)


def _write(folder: Path, state: RunState) -> None:
    with replacing(folder / STATE) as file:
        file.write(msgspec.json.encode(state))


class Metrics:
    """Reads metrics.jsonl as it grows. If a step was trained again after a crash, its last line counts."""

    def __init__(self, path: Path, *, whole_rows: int | None = None) -> None:
        """With `whole_rows`, keep only the reward of older rows: a run may have millions of steps."""
        self._path, self._at, self._whole = path, 0, whole_rows
        self._rows: dict[int, dict[str, Any]] = {}
        self._in_order: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        """Return one row per step, in order of steps."""
        rows, self._at = new_rows(self._path, self._at)
        for row in rows:
            step = int(row["step"] or 0)
            self._rows[step] = row
            if self._whole is not None and (old := self._rows.get(step - self._whole)) is not None:
                self._rows[step - self._whole] = {name: old.get(name) for name in ("step", "train/reward")}
        if rows:
            self._in_order = [self._rows[step] for step in sorted(self._rows)]
        return self._in_order


class PlaneLines:
    """Appends one line per step to plane.jsonl: what the plane had accepted, held and dropped by then."""

    def __init__(self, path: Path) -> None:
        self._path, self._step = path, 0

    def note(self, status: Mapping[str, Any]) -> None:
        """Write a line if the plane has reached another step."""
        step = int(status.get("next_step", 1)) - 1
        if step < 1 or step == self._step:
            return
        self._step = step
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **ledger_numbers(status["ledger"])}) + "\n")


def ledger_numbers(ledger: Mapping[str, Any]) -> dict[str, int]:
    """Return a ledger's counts under the names of metrics.

    >>> ledger_numbers({"accepted": 9, "committed": 4, "held": 3, "dropped": {"stale": 2}})
    {'gen/accepted': 9, 'train/committed': 4, 'buffer/held': 3, 'buffer/dropped/stale': 2}
    """
    dropped = {f"buffer/dropped/{reason}": count for reason, count in ledger["dropped"].items()}
    return {
        "gen/accepted": ledger["accepted"],
        "train/committed": ledger["committed"],
        "buffer/held": ledger["held"],
        **dropped,
    }
