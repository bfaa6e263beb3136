"""Files in a run's folder that the launcher reads and writes: metrics.jsonl, plane.jsonl, logs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class Metrics:
    """Reads metrics.jsonl as it grows. If a step was trained again after a crash, its last line counts."""

    def __init__(self, path: Path, *, whole_rows: int | None = None) -> None:
        """With `whole_rows`, keep only the reward of older rows: a run may have millions of steps."""
        self._path, self._at, self._whole = path, 0, whole_rows
        self._rows: dict[int, dict[str, float]] = {}
        self._in_order: list[dict[str, float]] = []

    def read(self) -> list[dict[str, float]]:
        """Return one row per step, in order of steps."""
        known = self._at
        for line in self._lines():
            with contextlib.suppress(json.JSONDecodeError, KeyError):
                row = json.loads(line)
                self._rows[int(row["step"])] = row
                self._shorten(int(row["step"]))
        if self._at != known:
            self._in_order = [self._rows[step] for step in sorted(self._rows)]
        return self._in_order

    def _shorten(self, newest: int) -> None:
        if self._whole is None or (old := self._rows.get(newest - self._whole)) is None:
            return
        self._rows[newest - self._whole] = {name: old[name] for name in ("step", "train/reward")}

    def _lines(self) -> Iterator[str]:
        """Yield complete new lines. A line without its newline is still being written and is read next time."""
        if not self._path.exists():
            return
        with self._path.open() as file:
            file.seek(self._at)
            while (line := file.readline()).endswith("\n"):
                self._at = file.tell()
                yield line


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


def last_lines(log: Path, count: int = 1) -> str:
    """Return the last lines of a log that are not blank."""
    with contextlib.suppress(OSError):
        found = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        if found:
            return "\n".join(found[-count:])
    return f"it wrote nothing; its log is {log}"
