"""Leases of groups that lack a column: what a scoring worker gets, and how it attaches its values.

The worker reads the samples from storage if it sees it, as ranks do, or gets them from the plane. Every sample is
verified against its digest before it is scored.
"""

from __future__ import annotations

import logging
import os
import platform
import time
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from penstock.arrays import Sample, Samples, sample_digests
from penstock.client.attaching import AttachResult, LateValue, Leased, attach
from penstock.client.conversations import Call, Conversation, Pause
from penstock.client.direct import Direct, reachable
from penstock.client.producer_connection import ProducerConnection, error_of, expected
from penstock.errors import CorruptFrame, InvalidInput, StorageError, UnknownKey
from penstock.frames import ANY_SIZE, decode
from penstock.protocol import MAX_NAME, Attached, ColumnsLeased, Frames, LeaseColumns, Rejected, StepPicks, seconds_of

if TYPE_CHECKING:
    from penstock.storage import KeptStorage

logger = logging.getLogger("penstock.client")
Run: TypeAlias = Callable[[Conversation[Any]], Any]
ARun: TypeAlias = Callable[[Conversation[Any]], Coroutine[Any, Any, Any]]
_AGAIN_S = 1.0
"""Pause after a group could not be read."""


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """The request of a scoring worker."""

    column: str
    groups: int
    tokenizer: Any
    lease_s: float
    timeout: float | None


class ColumnLease:
    """Groups that lack a column, leased to this process. Renewed until the values are attached or the lease is
    dropped."""

    def __init__(
        self,
        connection: ProducerConnection,
        asked: LeaseRequest,
        leased: ColumnsLeased,
        samples: Sequence[Sample],
        seen: Leased | None = None,
    ) -> None:
        """`seen`: the storage and the picks, if this worker sees the storage."""
        self.column = asked.column
        self.samples = list(samples)
        """The samples that lack the column: `id`, `group`, `prompt`, `env`, `token_ids`, `loss_mask`, `rollout`."""
        self.cancelled: dict[str, str] = {}
        """Groups whose values are no longer wanted, and why: another worker was faster, or the group was dropped."""
        self._connection, self._asked, self._seen = connection, asked, seen
        self._numbers = dict(zip(self.groups, leased.leases, strict=True))
        """Group -> its lease."""
        self._open = {group: {sample.id for sample in samples} for group, samples in self.groups.items()}
        """Group -> samples without a value."""
        now, mine = time.monotonic(), weakref.ref(self)
        for group, number in self._numbers.items():
            connection.renewals.hold(number, asked.lease_s, now, partial(_cancel, mine, group))
        self._finalize = weakref.finalize(self, _abandon, connection, leased.leases)
        self._finalize.atexit = False  # the connection's end returns them

    @property
    def groups(self) -> dict[str, list[Sample]]:
        """The samples by group."""
        found: dict[str, list[Sample]] = {}
        for sample in self.samples:
            found.setdefault(sample.group, []).append(sample)
        return found

    def text(self, sample: Sample, *, trained: bool = False) -> str:
        """Return the text of a sample's tokens, or only of those that the model sampled (`trained`)."""
        if self._asked.tokenizer is None:
            raise InvalidInput("text: no tokenizer; give one: plane.lacking(..., tokenizer=tokenizer)")
        ids = sample.token_ids[sample.loss_mask] if trained else sample.token_ids
        return str(self._asked.tokenizer.decode(ids.tolist()))

    def attach(self, values: Mapping[str, LateValue], *, errors: Mapping[str, str] | None = None) -> AttachResult:
        """Attach values by sample id: a number, or one value per token if the column has them. Durable when this
        returns. A sample in `errors` could not be scored.

        Raises `Conflict`, and attaches nothing, if a sample has another value already."""
        from penstock.client.conversations import run

        self._connection.check_open()
        return run(self._attach(values, errors or {}))

    async def aattach(
        self, values: Mapping[str, LateValue], *, errors: Mapping[str, str] | None = None
    ) -> AttachResult:
        """`attach` for asyncio."""
        import asyncio

        from penstock.client.conversations import arun

        self._connection.check_open()
        return await arun(self._attach(values, errors or {}), asyncio.to_thread)

    def _attach(self, values: Mapping[str, LateValue], errors: Mapping[str, str]) -> Conversation[AttachResult]:
        scored, failed = self._by_group(values), self._by_group(errors)
        result = yield from attach(self._connection, self.column, scored, failed, self._seen)
        for group in {*scored, *failed}:
            self._open[group] -= {*scored.get(group, ()), *failed.get(group, ())}
            if not self._open[group]:
                self._connection.renewals.release(self._numbers[group])
        if not any(self._open.values()):
            self._finalize.detach()
        return result

    def _by_group(self, values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        if not isinstance(values, Mapping):
            raise InvalidInput(f"attach {self.column}: {values!r:.80}; give values by sample id: {{sample.id: ...}}")
        known: dict[str, list[str]] = {}
        for sample in self.samples:
            known.setdefault(sample.id, []).append(sample.group)
        found: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            groups = known.get(name, [])
            if len(groups) != 1:
                many = f"in {len(groups)} groups of it; attach by group: plane.attach"
                text = many if groups else "not in this lease"
                raise UnknownKey(f"attach {self.column}: sample {name!r:.80}: {text}; nothing was attached")
            found.setdefault(groups[0], {})[name] = value
        return found

    def give_back(self, reason: str = "") -> None:
        """Return what is not attached, so that another worker gets it at once."""
        if self._finalize.detach() is not None:
            _abandon(self._connection, [self._numbers[group] for group, names in self._open.items() if names], reason)

    def __repr__(self) -> str:
        return f"ColumnLease({self.column!r}, samples={len(self.samples)}, groups={len(self.groups)})"


def _cancel(lease: weakref.ref[ColumnLease], group: str, reason: str) -> None:
    found = lease()
    if found is not None:
        found.cancelled[group] = reason


def _abandon(connection: ProducerConnection, numbers: Sequence[int], reason: str = "") -> None:
    for number in numbers:
        connection.renewals.abandon(number, reason)


# ------------------------------------------------------------------ asking


class _Worker:
    """Asks for groups, and reads their samples."""

    def __init__(self, connection: ProducerConnection, asked: LeaseRequest) -> None:
        self._connection, self._asked = connection, asked
        self._storage: KeptStorage | None = None
        self._has_failed = False
        """Whether the last read failed."""
        self._name = f"{platform.node()}:{os.getpid()}"[:MAX_NAME]

    def reach(self, attached: Attached) -> None:
        """Find out whether this process reads storage itself."""
        self._storage = reachable(attached)

    def seen(self, leased: ColumnsLeased, direct: Direct) -> Leased | None:
        """Return what is needed to write frames of leased groups, if this process sees the storage."""
        if self._storage is None:
            return None
        picks = StepPicks.from_bytes(leased.picks).groups
        return Leased(self._storage, direct, {picked.group: picked for picked in picks})

    def next(self) -> Conversation[tuple[ColumnsLeased, list[Sample]] | None]:
        """Return the next leases with their samples, or None after `timeout` seconds without any."""
        timeout = seconds_of(self._asked.timeout)
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            answer = yield from self._connection.ask(self._question)
            if isinstance(answer, Rejected):
                error = error_of(answer)
                if not isinstance(error, CorruptFrame | StorageError):
                    raise error
                yield from self._failed(error)
                continue
            answer = expected(answer, ColumnsLeased)
            if answer.leases:
                try:
                    samples = yield Call(partial(self._read, answer, self._connection.payload(answer.ticket)))
                except (CorruptFrame, StorageError) as error:
                    _abandon(self._connection, answer.leases, str(error)[:200])
                    yield from self._failed(error)
                    continue
                self._has_failed = False
                return answer, samples
            if until is not None and time.monotonic() >= until:
                return None

    def _failed(self, error: Exception) -> Conversation[None]:
        logger.warning("lacking %s: %s; others may be able to read it", self._asked.column, error)
        if self._has_failed:  # the plane may see what this process does not
            self._storage = None
        # Once is no sign of that: a worker with another column may have given the group a new frame meanwhile.
        self._has_failed = True
        yield Pause(_AGAIN_S)

    def _question(self, ticket: int) -> LeaseColumns:
        return LeaseColumns(
            ticket=ticket,
            column=self._asked.column,
            groups=self._asked.groups,
            worker=self._name,
            lease_s=self._asked.lease_s,
            direct=self._storage is not None,
        )

    def _read(self, answer: ColumnsLeased, frames: Frames) -> list[Sample]:
        picks = StepPicks.from_bytes(answer.picks)
        if any(len(frame) for frame in frames):
            samples: Samples = decode(b"".join(frames), limits=ANY_SIZE)
        elif self._storage is not None:
            from penstock.client.storage_reader import StorageReader

            samples = StorageReader(self._storage).samples(picks)
        else:
            raise CorruptFrame("samples to score: neither sent nor in reach")
        if sample_digests(samples) != picks.digests:
            raise CorruptFrame("samples to score: not the bytes that were put")
        return list(samples)


def lease_forever(
    connection: ProducerConnection, asked: LeaseRequest, attached: Callable[[], Attached], direct: Direct, run: Run
) -> Iterator[ColumnLease]:
    """Yield leases until none comes for `timeout` seconds."""
    worker = _Worker(connection, asked)
    worker.reach(attached())
    while (found := run(worker.next())) is not None:
        leased, samples = found
        yield ColumnLease(connection, asked, leased, samples, worker.seen(leased, direct))


async def alease_forever(
    connection: ProducerConnection, asked: LeaseRequest, attached: Callable[[], Attached], direct: Direct, arun: ARun
) -> AsyncIterator[ColumnLease]:
    """`lease_forever` for asyncio."""
    import asyncio

    worker = _Worker(connection, asked)
    worker.reach(await asyncio.to_thread(attached))
    while (found := await arun(worker.next())) is not None:
        leased, samples = found
        yield ColumnLease(connection, asked, leased, samples, worker.seen(leased, direct))


def lease_once(
    connection: ProducerConnection, asked: LeaseRequest
) -> Conversation[tuple[dict[str, int], list[Sample]]]:
    """Lease groups once, without renewing them. Returns the lease of each group, and samples that the plane read."""
    found = yield from _Worker(connection, asked).next()
    if found is None:
        return {}, []
    leased, samples = found
    return dict(zip(dict.fromkeys(sample.group for sample in samples), leased.leases, strict=True)), samples
