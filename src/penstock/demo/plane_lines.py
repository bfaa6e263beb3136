"""What the plane held, accepted and dropped when each step was trained: one line per step in `plane.jsonl`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class PlaneLines:
    """Appends a line whenever the plane has come to another step."""

    def __init__(self, path: Path) -> None:
        self._path, self._step = path, 0

    def note(self, status: Mapping[str, Any]) -> None:
        """The plane's status as it is now; nothing is written while its step is the same."""
        step = int(status.get("next_step", 1)) - 1
        if step < 1 or step == self._step:
            return
        self._step = step
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **ledger_numbers(status["ledger"])}) + "\n")


def ledger_numbers(ledger: Mapping[str, Any]) -> dict[str, int]:
    """A ledger under the names of metrics.

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
