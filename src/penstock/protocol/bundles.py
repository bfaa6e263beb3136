"""Bundles: several messages about puts travel as one, so that a batch arrives, is logged and is answered at once.

A bundle is handled as if its messages had come one after another. Every put in it keeps its own ticket, its own place
in the queue for room and its own answer, so nothing else in the protocol knows about bundles.

    put_many(a, b, c)    ->  bundle(put a, put b, put c)
                         <-  answers(accepted a, rejected b, accepted c)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.errors import CorruptFrame
from penstock.protocol.messages import Answers, AskRoom, Bundle, Frames, FromClient, FromPlane, GiveUp, One, Put, Trace
from penstock.protocol.retry import Out

_BYTES = 1 << 20
"""Payload and metadata in one bundle. A bundle is in memory as a whole before the plane sees any of it, so it must not
be much larger than one group."""
_FRAMES = 12
"""Payload buffers in one bundle. Transports accept 14."""
_MESSAGES = 256


def bundled(outs: Sequence[Out]) -> Iterator[Out]:
    """Join messages about puts. Those without a payload stay apart: they travel on a connection of their own."""
    for wants_payload in (False, True):
        batch: list[Out] = []
        size = frames = 0
        for out in outs:
            if bool(out.frames) != wants_payload:
                continue
            if not isinstance(out.message, Put | Trace | AskRoom | GiveUp):
                yield out
                continue
            mine = sum(map(len, out.frames)) + (len(out.message.metadata) if isinstance(out.message, Put) else 0)
            too_many = frames + len(out.frames) > _FRAMES or len(batch) >= _MESSAGES
            if batch and (size + mine > _BYTES or too_many):
                yield _joined(batch)
                batch, size, frames = [], 0, 0
            batch.append(out)
            size, frames = size + mine, frames + len(out.frames)
        if batch:
            yield _joined(batch)


def _joined(batch: list[Out]) -> Out:
    if len(batch) == 1:
        return batch[0]
    # `bundled` lets only these kinds through.
    messages = tuple(out.message for out in batch if isinstance(out.message, Put | Trace | AskRoom | GiveUp))
    payloads = tuple(len(out.frames) for out in batch)
    return Out(Bundle(messages=messages, payloads=payloads), [frame for out in batch for frame in out.frames])


def unbundled(message: FromClient, frames: Frames) -> list[tuple[One, Frames]]:
    """Return the messages of a bundle, each with its payload. Any other message is returned as it is."""
    if not isinstance(message, Bundle):
        return [(message, frames)]
    counts = message.payloads
    if len(counts) != len(message.messages) or min(counts, default=0) < 0 or sum(counts) != len(frames):
        raise CorruptFrame(f"bundle of {len(message.messages)}: payloads {counts[:8]}, {len(frames)} arrived")
    found: list[tuple[One, Frames]] = []
    start = 0
    for one, count in zip(message.messages, counts, strict=True):
        found.append((one, frames[start : start + count]))
        start += count
    return found


def answered(messages: list[FromPlane]) -> Iterator[FromPlane]:
    """Join answers to one client."""
    for start in range(0, len(messages), _MESSAGES):
        some = messages[start : start + _MESSAGES]
        yield some[0] if len(some) == 1 else Answers(answers=tuple(some))  # type: ignore[arg-type] # only answers to puts
