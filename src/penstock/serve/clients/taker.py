"""A rank's samples, taken from keepers: lines to those who have them, and the samples in the order of the plan."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from penstock.arrays import Sample, Samples
from penstock.encode import Limits, decode
from penstock.errors import Closed, CorruptFrame
from penstock.send.keeper_messages import KeeperAt, Taken, Taking
from penstock.send.keys import ClientKeys
from penstock.send.lines import Lines
from penstock.send.message_header import pack_message, read_from_plane
from penstock.send.messages import Frames
from penstock.send.picks import StepPicks
from penstock.send.taking import Part, Say, TakeSession
from penstock.send.timeouts import Timeouts

ANY_SIZE = Limits(max_samples=1 << 31, max_tokens=1 << 40, max_bytes=1 << 50)
"""A step is as large as the plane was told to make it; its size was checked group by group."""


class NotHad(CorruptFrame):
    """Samples that no keeper gave."""


class Taker:
    """Used by one thread, but for `stop`."""

    def __init__(self, keys: Callable[[], ClientKeys | None], *, node: str, timeouts: Timeouts) -> None:
        """`keys` gives what lines are opened with."""
        self._keys, self._node, self._timeouts = keys, node, timeouts
        self._lines: Lines | None = None
        self._stopped = threading.Event()

    def take(self, frames: Frames, keepers: Sequence[KeeperAt], run_id: bytes) -> Samples:
        """The samples that a step's picks name, in order; NotHad says what nobody gave."""
        picks = StepPicks.from_frames(frames)
        session = TakeSession(picks, keepers, node=self._node, timeouts=self._timeouts)
        lines = self._lines = self._lines or Lines()
        keys = self._keys()
        for at in keepers:
            if at.url:
                lines.connect(at.name, at.url, None if keys is None else keys.to(at.key))
        self._say(session.start(time.monotonic()), run_id)
        while not session.is_over:
            if self._stopped.is_set():
                raise Closed("this source was closed")
            lines.poll(min(self._timeouts.resend_s / 2, 0.25))
            now = time.monotonic()
            for _, header, payload in lines.receive():
                with suppress(CorruptFrame):  # as if it had been lost: it is asked for again
                    message = read_from_plane(header)
                    if isinstance(message, (Taken, Taking)):
                        self._say(session.on_message(message, payload, now), run_id)
            self._say(session.on_tick(now), run_id)
        if session.missing:
            group, why = next(iter(session.missing.items()))
            raise NotHad(f"group {group!r}: {why}" + (f", and {n} others" if (n := len(session.missing) - 1) else ""))
        return in_order(picks, session.parts)

    def _say(self, says: list[Say], run_id: bytes) -> None:
        assert self._lines is not None
        for say in says:
            self._lines.send(say.keeper, pack_message(say.message, run_id))

    def pause(self, seconds: float) -> None:
        """Wait, unless it is stopped."""
        self._stopped.wait(seconds)

    def stop(self) -> None:
        """From any thread: a `take` under way ends."""
        self._stopped.set()

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()


def in_order(picks: StepPicks, parts: Sequence[Part]) -> Samples:
    """The samples of all parts, as the plan counts them."""
    decoded = [decode(_joined(part.frame), limits=ANY_SIZE) for part in parts]
    if len(parts) == 1 and list(parts[0].groups) == list(range(len(picks.groups))):
        return decoded[0]
    rows: list[list[Sample]] = [[] for _ in picks.groups]
    for part, samples in zip(parts, decoded, strict=True):
        at = 0
        for group in part.groups:
            count = len(picks.groups[group].rows)
            rows[group] = [samples[i] for i in range(at, min(at + count, len(samples)))]
            at += count
    return Samples.of([sample for group in rows for sample in group])


def _joined(frames: Frames) -> bytes | bytearray | memoryview:
    return frames[0] if len(frames) == 1 else b"".join(frames)
