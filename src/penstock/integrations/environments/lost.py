"""What does not survive a conversion, counted by name: fields nobody reads, columns the target has no place for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from penstock.arrays import COLUMNS, Sample

_FACTS = tuple(name for name, column in COLUMNS.items() if column.per == "sample" and name != "id")


@dataclass(frozen=True, slots=True)
class Lost:
    """The counts of one conversion; readers and writers add to them as they go.

    >>> lost = Lost()
    >>> lost.fields({"tokens": [1], "label": "4", "metadata": {}}, known=("tokens",))
    >>> lost.columns(Sample(token_ids=[1, 2], rewards=1.0, env="math"), held=("token_ids", "loss_mask"))
    >>> lost.as_dict()
    {'unread': {'label': 1}, 'unwritten': {'env': 1, 'rewards': 1}, 'left_out': {}}
    """

    unread: Counter[str] = field(default_factory=Counter)
    """Fields of the input that a sample has no place for: in how many records."""
    unwritten: Counter[str] = field(default_factory=Counter)
    """Columns and facts of samples that the target has no place for: of how many samples."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Samples that the target cannot hold at all, by reason."""

    def __bool__(self) -> bool:
        return bool(self.unread or self.unwritten or self.left_out)

    def fields(self, record: Any, known: Iterable[str]) -> None:
        """Count the fields of a mapping that were not read; empty ones say nothing and are not missed."""
        taken = set(known)
        self.unread.update(name for name, value in record.items() if name not in taken and _says_something(value))

    def keeps(self, sample: Sample, *, needs: Iterable[str] = ()) -> bool:
        """Whether a target without images can hold a sample that it needs these columns of; counted where not.

        A sample whose images are missing would be trained as if its placeholders were text.
        """
        reason = "images" if sample.images else next((f"no {name}" for name in needs if name not in sample), None)
        self.left_out.update([reason] if reason else [])
        return reason is None

    def columns(self, sample: Sample, held: Iterable[str]) -> None:
        """Count what this sample has and the target does not hold, ids aside: those every reader can make."""
        taken = set(held)
        facts = (name for name in (*_FACTS, "images") if name not in taken and _is_given(sample, name))
        self.unwritten.update([*facts, *(name for name in sample.columns if name not in taken)])

    def as_dict(self) -> dict[str, dict[str, int]]:
        return {
            "unread": dict(sorted(self.unread.items())),
            "unwritten": dict(sorted(self.unwritten.items())),
            "left_out": dict(sorted(self.left_out.items())),
        }


def _is_given(sample: Sample, name: str) -> bool:
    """Whether a fact says something: not what it is when nobody gives it."""
    value = getattr(sample, name)
    return value not in (None, (), "") and (name, value) != ("mode", COLUMNS["mode"].fill)


def _says_something(value: Any) -> bool:
    """Whether a field holds more than its absence would."""
    if value is None:
        return False
    return bool(value) if isinstance(value, str | list | tuple | dict) else True
