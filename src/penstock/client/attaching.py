"""Late columns: give samples of accepted groups the values that they lacked when they were put."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from penstock.client.conversations import Conversation
from penstock.client.producer_connection import ProducerConnection, error_of
from penstock.errors import InvalidInput
from penstock.protocol import AttachValues, Rejected, ValuesAttached


class AttachResult(NamedTuple):
    """What became of attached values, in samples."""

    new: int
    """Attached by this call."""
    known: int
    """Had the same value already: somebody was faster."""
    late: int
    """Of groups that were dropped, or trained without the value. Not used."""


def attach(
    connection: ProducerConnection,
    column: str,
    values: Mapping[str, Mapping[str, float]],
    errors: Mapping[str, Mapping[str, str]],
) -> Conversation[AttachResult]:
    """Attach values by group and sample."""
    numbers = {group: {name: _number(column, name, one) for name, one in own.items()} for group, own in values.items()}
    words = {group: {name: str(why) for name, why in own.items()} for group, own in errors.items()}
    answer = yield from connection.ask(
        lambda ticket: AttachValues(ticket=ticket, column=column, values=numbers, errors=words)
    )
    if isinstance(answer, Rejected):
        raise error_of(answer)
    assert isinstance(answer, ValuesAttached)
    return AttachResult(answer.new, answer.known, answer.late)


def _number(column: str, sample: str, value: object) -> float:
    """Return a number that a judge gave: of Python, numpy or torch. Raises InvalidInput."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise InvalidInput(
            f"attach {column}: sample {sample!r:.80}: {value!r:.60}; give a number, or the sample in `errors`"
        ) from None
