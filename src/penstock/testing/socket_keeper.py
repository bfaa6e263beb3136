"""A keeper elsewhere as a `Keeper`, over its sockets: what another keeper and a rank say to it, one call at a time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import xxhash

from penstock.encode import read_head
from penstock.encode.layout import Allocate, Buffer
from penstock.errors import CorruptFrame, DiskFull, PlaneLost
from penstock.keep.keeper import DamagedFrame, Pick
from penstock.send.keeper_messages import Copied, CopyFrame, DropCopies, Take, Taken
from penstock.send.keys import ClientKeys
from penstock.send.lines import Lines
from penstock.send.message_header import pack_message, read_from_plane
from penstock.send.messages import Frames, FromClient

PATIENCE_S, RESEND_S = 60.0, 1.0


class SocketKeeper:
    """Locations are `number:group`."""

    def __init__(
        self, url: str, run_id: bytes, num_bytes: Callable[[], int], *, keys: ClientKeys | None = None
    ) -> None:
        """`num_bytes` says what the keeper keeps, which only its plane is told."""
        self._lines, self._run_id, self._num_bytes = Lines(), run_id, num_bytes
        self._lines.connect("keeper", url, keys)
        self._tickets = itertools.count(1)
        self._all: dict[str, int] = {}

    def keep(self, frames: Sequence[Buffer]) -> list[str]:
        return [self.copy(frame)[0] for frame in frames]

    def copy(self, frame: Buffer, *, times: int = 1) -> list[str]:
        """Where a frame is kept, as each of several copies of one question is answered."""
        group = read_head(frame).text["group"][0]
        message = CopyFrame(ticket=next(self._tickets), group=group, digest=xxhash.xxh3_128_digest(frame))
        found = []
        for _ in range(times):
            answer, _ = self._ask(message, Copied, message.ticket, [bytes(frame)])
            assert isinstance(answer, Copied)
            if answer.error:
                raise DiskFull(f"group {group!r}: {answer.error}; nothing was kept")
            found.append(f"{answer.number}:{group}")
            self._all[found[-1]] = answer.number
        return found

    def read(self, location: str) -> Buffer:
        number, _, group = location.partition(":")
        if not number.isdecimal():
            raise CorruptFrame(f"location {location!r}: no frame is kept there")
        answer, frames = self._take([(int(number), group, ())])
        if answer.missing:
            raise CorruptFrame(f"location {location!r}: {answer.missing[0][1]}")
        return frames[0]

    def take(self, requests: Sequence[Sequence[Pick]], allocate: Allocate | None = None) -> list[memoryview]:
        return [self._gather(request, allocate) for request in requests]

    def _gather(self, request: Sequence[Pick], allocate: Allocate | None) -> memoryview:
        if not request:
            return memoryview(b"")
        answer, frames = self._take([(int(pick.location.partition(":")[0]), pick.group, pick.rows) for pick in request])
        if answer.missing:
            which, why = answer.missing[0]
            raise DamagedFrame(request[which].group, why.rpartition("its frame is damaged or gone: ")[2])
        taken = memoryview(bytearray(frames[0]) if allocate is None else allocate(len(frames[0])))[: len(frames[0])]
        taken[:] = frames[0]
        return taken

    def _take(self, picks: list[tuple[int, str, tuple[int, ...]]]) -> tuple[Taken, Frames]:
        message = Take(ticket=next(self._tickets), picks=tuple(picks))
        answer, frames = self._ask(message, Taken, message.ticket)
        assert isinstance(answer, Taken)
        return answer, frames

    def forget(self, locations: Iterable[str]) -> None:
        numbers = tuple(self._all[location] for location in locations)
        self._lines.send("keeper", pack_message(DropCopies(numbers=numbers), self._run_id))
        with suppress(CorruptFrame):
            self.read("0:nobody")  # answered after what was said before

    def sweep(self) -> None:
        """It does that by itself."""

    def retain(self, locations: Iterable[str]) -> None:
        wanted = set(locations)
        self.forget([location for location in self._all if location not in wanted])

    @property
    def num_bytes(self) -> int:
        return self._num_bytes()

    def close(self) -> None:
        self._lines.close()

    def _ask(self, message: FromClient, kind: type, ticket: int, frames: Frames = ()) -> tuple[object, Frames]:
        """Until it is answered."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            self._lines.send("keeper", pack_message(message, self._run_id), frames)
            again = time.monotonic() + RESEND_S
            while time.monotonic() < again:
                self._lines.poll(0.05)
                for _, header, payload in self._lines.receive():
                    answer = read_from_plane(header)
                    if isinstance(answer, kind) and getattr(answer, "ticket", None) == ticket:
                        return answer, payload
        raise PlaneLost(f"the keeper did not answer a {type(message).__name__} within {PATIENCE_S:g} s")
