"""Late columns: give samples of accepted groups the values that they lacked when they were put.

Numbers go into the message. Values per token go into the group's frame: a worker that leased the groups and sees the
storage writes the new frames itself, the others send the values to the plane.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import xxhash
from msgspec.structs import replace

from penstock.arrays import COLUMNS, Values, sample_digests
from penstock.client.conversations import Call, Conversation
from penstock.client.producer_connection import ProducerConnection, error_of, expected
from penstock.errors import CorruptFrame, InvalidInput, PenstockError
from penstock.frames import (
    ANY_SIZE,
    LATE_COLUMNS,
    FramePieces,
    LateValuesFrame,
    decode,
    encode_values,
    metadata_of_pieces,
)
from penstock.protocol import AttachValues, Frames, PickedGroup, Rejected, StoredFrame, ValuesAttached

if TYPE_CHECKING:
    from penstock.client.direct import Direct, DirectWriter
    from penstock.storage import KeptStorage

logger = logging.getLogger("penstock.client")
LateValue: TypeAlias = float | Values | Mapping[str, Values]
"""A number for the sample, one value per token, or, of columns that go together, these by column."""
_MAX_METADATA = 4 << 20
"""Bytes of metadata in one message. Beyond this the values are sent."""
_REPEATED = ("Sealed", "Unseen", "Outdated")
"""Rejections after which the values are sent to the plane: it takes no frames from here, or not these."""


class AttachResult(NamedTuple):
    """The result of an attach, in samples."""

    new: int
    """Attached by this call."""
    known: int
    """Had the same value already: another worker was faster, or this call is a repeat."""
    late: int
    """Of groups that were dropped, or trained without the value. Not used."""


@dataclass(frozen=True, slots=True)
class Leased:
    """The storage and the picks of leased groups, for a worker that sees the storage."""

    storage: KeptStorage
    direct: Direct
    picks: Mapping[str, PickedGroup]
    """By group."""


def attach(
    connection: ProducerConnection,
    column: str,
    values: Mapping[str, Mapping[str, LateValue]],
    errors: Mapping[str, Mapping[str, str]],
    leased: Leased | None = None,
) -> Conversation[AttachResult]:
    """Attach values by group and sample."""
    _check_shape(column, "values", values)
    _check_shape(column, "errors", errors)
    given = {group: own for group, own in values.items() if own}
    words = {group: {name: str(why) for name, why in own.items()} for group, own in errors.items()}
    message = AttachValues(ticket=0, column=column, values={}, errors=words)
    if column in LATE_COLUMNS or not given:
        numbers = {
            group: {name: _number(column, name, one) for name, one in own.items()} for group, own in given.items()
        }
        return _result((yield from _send(connection, replace(message, values=numbers))))
    frame: bytes = yield Call(partial(encode_values, column, given))
    if leased is not None and column in COLUMNS:  # the plane knows how columns of a run's own are declared
        stored: tuple[StoredFrame, ...] = yield Call(partial(_store, leased, column, frame))
        if stored:
            answer = yield from _send(connection, replace(message, stored=stored))
            if not (isinstance(answer, Rejected) and answer.kind in _REPEATED):
                return _result(answer)
            yield Call(partial(_leave, leased, stored, answer))
    message = replace(message, groups=tuple(given), digest=xxhash.xxh3_128_digest(frame))
    return _result((yield from _send(connection, message, (frame,))))


def _check_shape(column: str, what: str, by_group: object) -> None:
    """Raise InvalidInput unless these are mappings: group -> sample -> value."""
    is_nested = isinstance(by_group, Mapping) and all(isinstance(own, Mapping) for own in by_group.values())
    if not is_nested:
        raise InvalidInput(
            f"attach {column}: {what}: {by_group!r:.80}; give them by group and sample id: "
            '{"group-1": {"group-1/0": ...}}'
        )


def _send(
    connection: ProducerConnection, message: AttachValues, frames: Frames = ()
) -> Conversation[ValuesAttached | Rejected]:
    answer = yield from connection.ask(lambda ticket: replace(message, ticket=ticket), frames)
    return answer if isinstance(answer, Rejected) else expected(answer, ValuesAttached)


def _result(answer: ValuesAttached | Rejected) -> AttachResult:
    if isinstance(answer, Rejected):
        raise error_of(answer)
    return AttachResult(answer.new, answer.known, answer.late)


def _number(column: str, sample: str, value: Any) -> float:
    """Return a number that a judge gave: of Python, numpy or torch. Raises InvalidInput."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidInput(
            f"attach {column}: sample {sample!r:.80}: {value!r:.60}; give a number, or the sample in `errors`"
        ) from None


# ------------------------------------------------------------------ directly to storage


def _store(leased: Leased, column: str, frame: bytes) -> tuple[StoredFrame, ...]:
    """Write the new frames. Returns none if the values must be sent to the plane. Raises InvalidInput for values that
    do not fit."""
    writer = leased.direct.writer()
    if writer is None or leased.direct.is_paused:
        return ()
    values = LateValuesFrame(frame, column)
    try:
        return _written(leased, writer, values)
    except InvalidInput:
        raise
    except PenstockError as error:
        logger.info("attach %s: %s; the values go through the plane", column, error)
        return ()


def _written(leased: Leased, writer: DirectWriter, values: LateValuesFrame) -> tuple[StoredFrame, ...]:
    made = {group: _merged(leased, values, group) for group in values.by_group}
    metadata = {
        group: metadata_of_pieces(
            pieces,
            group=group,
            seq_len=leased.direct.seq_len,
            drop=leased.direct.drops_long,
            is_partial=True,
        ).to_bytes()
        for group, pieces in made.items()
    }
    if sum(map(len, metadata.values())) > _MAX_METADATA:
        return ()
    locations = writer.write([pieces.pieces for pieces in made.values()])
    return tuple(
        StoredFrame(
            group=group,
            base=leased.picks[group].location,
            location=location,
            metadata=metadata[group],
            digest=pieces.digest(),
            values=values.digests[group],
        )
        for (group, pieces), location in zip(made.items(), locations, strict=True)
    )


def _merged(leased: Leased, values: LateValuesFrame, group: str) -> FramePieces:
    """Read a group's frame and give its samples their values. Checks the digests of samples that get values; the plane
    checks those of the others."""
    pick = leased.picks[group]
    samples = decode(leased.storage.read(pick.location)[0], limits=ANY_SIZE)
    if sample_digests(samples.take(pick.rows)) != list(pick.digests):
        raise CorruptFrame(f"group {group!r}: not the bytes that were put")
    return values.merged(group, samples)


def _leave(leased: Leased, stored: tuple[StoredFrame, ...], answer: Rejected) -> None:
    """Write no further frames to segments that the plane takes none from."""
    logger.info("attach: %s; the values go through the plane", answer.reason)
    writer = leased.direct.writer()
    if writer is not None and answer.kind != "Outdated":
        for segment in {one.location.partition(":")[0] for one in stored}:
            writer.leave(segment)
