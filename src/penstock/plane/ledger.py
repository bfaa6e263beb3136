"""The ledger: for every sample that was accepted one state, and the sum of them all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.log import State
from penstock.protocol import OVER_LENGTH

_FIELDS = {state: state.name.lower() for state in State}


@dataclass(slots=True)
class Ledger:
    """Samples by state. `accepted` is always the sum of all the others."""

    accepted: int = 0
    held: int = 0
    scheduled: int = 0
    delivered: int = 0
    committed: int = 0
    quarantined: int = 0
    evaluation: int = 0
    """Samples of evaluation groups, which no step uses; also of those whose frames were given back since."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Samples that were accepted and will not be trained, by reason."""
    uses: int = 0
    """Samples scheduled, counted again each time a replay policy reuses one."""
    discarded: Counter[str] = field(default_factory=Counter)
    """Samples that were generated but filtered out before they were put, by reason; not part of the sum."""
    over_length: Counter[str] = field(default_factory=Counter)
    """Samples longer than `seq_len` that were truncated or dropped, and their tokens. Not part of the sum: a sample
    counts with its group, whose other samples are trained."""

    def shorten(self, counts: Mapping[str, int]) -> None:
        """Count samples and tokens that were truncated or dropped."""
        self.over_length.update(counts)

    def add(self, state: State, reason: str, samples: int) -> None:
        """Count samples into a state; a negative number takes them out of it."""
        if state is State.DROPPED:
            self.dropped[reason] += samples
        else:
            name = _FIELDS[state]
            setattr(self, name, getattr(self, name) + samples)

    @property
    def balanced(self) -> bool:
        parts = self.held + self.scheduled + self.delivered + self.committed + self.quarantined + self.evaluation
        return self.accepted == parts + self.dropped.total()

    @staticmethod
    def from_dict(found: dict[str, Any]) -> Ledger:
        """The ledger that `as_dict` was called on."""
        plain = {name: found[name] for name in ("accepted", "held", "scheduled", "delivered", "committed")}
        return Ledger(
            **plain,
            quarantined=found["quarantined"],
            evaluation=found["evaluation"],
            dropped=Counter(found["dropped"]),
            uses=found["uses"],
            discarded=Counter(found["discarded"]),
            over_length=Counter(found.get("over_length", {})),
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "accepted": self.accepted,
            "held": self.held,
            "scheduled": self.scheduled,
            "delivered": self.delivered,
            "committed": self.committed,
            "dropped": {reason: count for reason, count in sorted(self.dropped.items()) if count},
            "quarantined": self.quarantined,
            "evaluation": self.evaluation,
            "uses": self.uses,
            "discarded": dict(sorted(self.discarded.items())),
            "over_length": {name: self.over_length[name] for name in OVER_LENGTH},
            "balanced": self.balanced,
        }
