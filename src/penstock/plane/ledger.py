"""The plane's counts of groups: samples by state, and kinds of held groups.

The ledger: every accepted sample is in exactly one state, so the states sum to what was accepted. All of it follows
from the log, so a restart goes on with the same figures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from penstock.frames import WITH, WITHOUT
from penstock.log import GroupRow, State
from penstock.notebook import html_table
from penstock.protocol import OVER_LENGTH

_FIELDS = {state: state.name.lower() for state in State}


@dataclass(slots=True, repr=False)
class Ledger:
    """Sample counts by state. `accepted` is the sum of the states.

    >>> print(Ledger(accepted=6, held=2, committed=4))
    6 accepted = 2 held + 4 committed (balanced)
    """

    accepted: int = 0
    held: int = 0
    scheduled: int = 0
    delivered: int = 0
    committed: int = 0
    quarantined: int = 0
    evaluation: int = 0
    """Samples of evaluation groups, which no step uses. Includes groups whose frames were freed."""
    waiting: int = 0
    """Samples of groups that lack columns which are attached later (`needs`)."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Accepted samples that will not be trained, by reason."""
    uses: int = 0
    """Scheduled samples, counted again each time replay reuses one."""
    discarded: Counter[str] = field(default_factory=Counter)
    """Samples filtered out before they were put, or left out when their group got its late columns, by reason. Not
    part of the sum: the latter are counted with their group."""
    over_length: Counter[str] = field(default_factory=Counter)
    """Truncated and dropped samples longer than `seq_len`, and their tokens. Not part of the sum, because such a sample
    is counted with its group."""

    masked: Counter[str] = field(default_factory=Counter)
    """Trained tokens that steps left out of the loss because they were too old (`max_token_staleness`), and samples
    with such tokens, counted again each time a sample is used. Not part of the sum: the sample is in its step."""

    given_up: Counter[str] = field(default_factory=Counter)
    """Prompts that `plane.tasks` gave up without a group, by reason. Not part of the sum: they have no samples."""

    def mask(self, tokens: int, samples: int) -> None:
        """Count stale tokens that a step does not train, and the samples they are in."""
        self.masked.update(stale_tokens=tokens, stale_samples=samples)

    def shorten(self, counts: Mapping[str, int]) -> None:
        """Count truncated and dropped samples and tokens."""
        self.over_length.update(counts)

    def add(self, state: State, reason: str, samples: int) -> None:
        """Add samples to a state. A negative number removes them."""
        if state is State.DROPPED:
            self.dropped[reason] += samples
        else:
            name = _FIELDS[state]
            setattr(self, name, getattr(self, name) + samples)

    @property
    def balanced(self) -> bool:
        parts = sum(getattr(self, name) for state, name in _FIELDS.items() if state is not State.DROPPED)
        return bool(self.accepted == parts + self.dropped.total())

    def __str__(self) -> str:
        parts = [f"{count:,} {name}" for name, count in self._parts() if count]
        verdict = "balanced" if self.balanced else "NOT BALANCED: please report this"
        return f"{self.accepted:,} accepted = {' + '.join(parts) or 'none'} ({verdict})"

    def __repr__(self) -> str:
        return f"Ledger({self})"

    def _repr_html_(self) -> str:
        return html_table(self, self._parts(), ("state", "samples"))

    def _parts(self) -> list[tuple[str, int]]:
        """Return the states that sum to `accepted`, dropped samples by reason."""
        states = [(name, getattr(self, name)) for state, name in _FIELDS.items() if state is not State.DROPPED]
        return states + [(f"dropped ({reason})", count) for reason, count in sorted(self.dropped.items()) if count]

    @staticmethod
    def from_dict(found: dict[str, Any]) -> Ledger:
        """Restore a ledger from `as_dict`."""
        plain = {name: found[name] for name in ("accepted", "held", "scheduled", "delivered", "committed")}
        return Ledger(
            **plain,
            quarantined=found["quarantined"],
            evaluation=found["evaluation"],
            waiting=found.get("waiting", 0),
            dropped=Counter(found["dropped"]),
            uses=found["uses"],
            discarded=Counter(found["discarded"]),
            over_length=Counter(found.get("over_length", {})),
            masked=Counter(found.get("masked", {})),
            given_up=Counter(found.get("given_up", {})),
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
            "waiting": self.waiting,
            "uses": self.uses,
            "discarded": dict(sorted(self.discarded.items())),
            "over_length": {name: self.over_length[name] for name in OVER_LENGTH},
            "masked": {name: self.masked[name] for name in ("stale_tokens", "stale_samples")},
            "given_up": dict(sorted(self.given_up.items())),
            "balanced": self.balanced,
        }


# ----------------------------------------------------------------- kinds: what all groups of a step must have in common


Kinds: TypeAlias = tuple[tuple[str, str], ...]
"""A group's kinds: (column, kind)."""


def odd_groups(kinds: Mapping[Kinds, int], held: Iterable[GroupRow]) -> dict[int, str]:
    """Return the held groups that cannot be in a step with the majority, by op, with the reason.

    What a step needs from its groups is best declared (`needs`) and then checked when they are put. Where it is not,
    groups with and without a column are both accepted, and the minority is quarantined before a step is drawn: with 30
    groups with `logprobs` and 2 without, those 2 are odd. On a tie, the groups without the column are. `kinds` counts
    held groups by their kinds."""
    found_of: dict[str, Counter[str]] = {}
    for group, count in kinds.items():
        for name, kind in group:
            found_of.setdefault(name, Counter())[kind] += count
    chosen = {
        name: max(counts, key=lambda kind: (counts[kind], kind != WITHOUT, kind))
        for name, counts in found_of.items()
        if len(counts) > 1
    }
    if not chosen:
        return {}
    found: dict[int, str] = {}
    for row in held:
        for name, kind in row.kinds:
            if kind != chosen.get(name, kind):
                count = found_of[name][chosen[name]]
                others = "1 held group is" if count == 1 else f"{count} held groups are"
                found[row.op] = (
                    f"{name}: this group is {_kind_text(kind)}, {others} {_kind_text(chosen[name])}; a step takes one "
                    "kind. Put all groups alike, or declare `needs`"
                )
    return found


def _kind_text(kind: str) -> str:
    return {WITH: "with it", WITHOUT: "without it"}.get(kind, f"of {kind}")
