"""Late columns: give samples of accepted groups the values that they lacked when they were put."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import xxhash
from msgspec.structs import replace

from penstock.arrays import Values
from penstock.client.conversations import Call, Conversation
from penstock.client.producer_connection import ProducerConnection, error_of
from penstock.errors import InvalidInput
from penstock.frames import LATE_COLUMNS, encode_values
from penstock.protocol import AttachValues, Frames, Rejected, ValuesAttached

LateValue: TypeAlias = float | Values | Mapping[str, Values]
"""A number for the sample, one value per token, or, of columns that go together, these by column."""


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
    values: Mapping[str, Mapping[str, LateValue]],
    errors: Mapping[str, Mapping[str, str]],
) -> Conversation[AttachResult]:
    """Attach values by group and sample."""
    words = {group: {name: str(why) for name, why in own.items()} for group, own in errors.items()}
    if column in LATE_COLUMNS or not any(values.values()):
        numbers = {
            group: {name: _number(column, name, one) for name, one in own.items()} for group, own in values.items()
        }
        return (yield from _send(connection, AttachValues(ticket=0, column=column, values=numbers, errors=words)))
    given = {group: own for group, own in values.items() if own}
    frame: bytes = yield Call(partial(encode_values, column, given))
    message = AttachValues(
        ticket=0, column=column, values={}, errors=words, groups=tuple(given), digest=xxhash.xxh3_128_digest(frame)
    )
    return (yield from _send(connection, message, (frame,)))


def _send(connection: ProducerConnection, message: AttachValues, frames: Frames = ()) -> Conversation[AttachResult]:
    answer = yield from connection.ask(lambda ticket: replace(message, ticket=ticket), frames)
    if isinstance(answer, Rejected):
        raise error_of(answer)
    assert isinstance(answer, ValuesAttached)
    return AttachResult(answer.new, answer.known, answer.late)


def _number(column: str, sample: str, value: Any) -> float:
    """Return a number that a judge gave: of Python, numpy or torch. Raises InvalidInput."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidInput(
            f"attach {column}: sample {sample!r:.80}: {value!r:.60}; give a number, or the sample in `errors`"
        ) from None
