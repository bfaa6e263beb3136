"""Files in a run's folder that the launcher reads and writes: metrics.jsonl, plane.jsonl, logs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.view import new_rows


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


def last_lines(log: Path, count: int = 1) -> str:
    """Return the last lines of a log that are not blank."""
    with contextlib.suppress(OSError):
        found = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        if found:
            return "\n".join(found[-count:])
    return f"it wrote nothing; its log is {log}"
