"""Count what a conversion loses, by name: input fields without a column, columns the target cannot hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from penstock.arrays import COLUMNS, Sample

_OF_SAMPLE = tuple(name for name, column in COLUMNS.items() if column.per == "sample" and name != "id")


@dataclass(frozen=True, slots=True)
class Lost:
    """The losses of one conversion. Readers and writers add to them.

    >>> lost = Lost()
    >>> lost.fields({"tokens": [1], "label": "4", "metadata": {}}, known=("tokens",))
    >>> lost.columns(Sample(token_ids=[1, 2], rewards=1.0, env="math"), held=("token_ids", "loss_mask"))
    >>> lost.as_dict()
    {'unread': {'label': 1}, 'unwritten': {'env': 1, 'rewards': 1}, 'left_out': {}}
    """

    unread: Counter[str] = field(default_factory=Counter)
    """Input fields that a sample cannot hold: name -> number of records."""
    unwritten: Counter[str] = field(default_factory=Counter)
    """Columns and other fields of samples that the target cannot hold: name -> number of samples."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Samples that the target cannot hold at all: reason -> number."""

    def __bool__(self) -> bool:
        return bool(self.unread or self.unwritten or self.left_out)

    def fields(self, record: Any, known: Iterable[str]) -> None:
        """Count the fields of a record that were not read. Empty fields are no loss."""
        taken = set(known)
        self.unread.update(name for name, value in record.items() if name not in taken and _is_filled(value))

    def keeps(self, sample: Sample, *, needs: Iterable[str] = ()) -> bool:
        """Check whether a target without images, which needs certain columns, can hold a sample. Counts it if not.

        A sample without its images would be trained as if its placeholders were text.
        """
        reason = "images" if sample.images else next((f"no {name}" for name in needs if name not in sample), None)
        self.left_out.update([reason] if reason else [])
        return reason is None

    def columns(self, sample: Sample, held: Iterable[str]) -> None:
        """Count what the sample has and the target does not hold. Ids are not counted: every reader can make them."""
        taken = set(held)
        others = (name for name in (*_OF_SAMPLE, "images") if name not in taken and _is_given(sample, name))
        self.unwritten.update([*others, *(name for name in sample.columns if name not in taken)])

    def as_dict(self) -> dict[str, dict[str, int]]:
        return {
            "unread": dict(sorted(self.unread.items())),
            "unwritten": dict(sorted(self.unwritten.items())),
            "left_out": dict(sorted(self.left_out.items())),
        }


def _is_given(sample: Sample, name: str) -> bool:
    """Check whether a field has another value than its default."""
    value = getattr(sample, name)
    return value not in (None, (), "") and (name, value) != ("mode", COLUMNS["mode"].fill)


def _is_filled(value: Any) -> bool:
    """Check whether a field holds anything."""
    if value is None:
        return False
    return bool(value) if isinstance(value, str | list | tuple | dict) else True
