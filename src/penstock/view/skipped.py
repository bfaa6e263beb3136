"""What a reader passes over, counted, with the first few reasons."""

from __future__ import annotations

from dataclasses import dataclass, field

_REASONS_KEPT = 5


@dataclass(slots=True)
class Skipped:
    """What could not be read."""

    lines: int = 0
    reasons: list[str] = field(default_factory=list)
    """The first few, with file and line."""

    def add(self, where: str, why: object) -> None:
        self.lines += 1
        if len(self.reasons) < _REASONS_KEPT:
            self.reasons.append(f"{where}: {why}"[:300])
