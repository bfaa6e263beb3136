"""Receives lists of prompts from workers: settings, and the prompts that the log lacks.

A worker offers a list by its digest. If the plane lacks it, the worker sends the chunks that are missing, and offers it
again. Rows for its prompts are reserved then, and belong to the list once a decision opens it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TypeAlias

import msgspec
import numpy as np

from penstock.arrays import MAX_TEXT, run_name_problem
from penstock.errors import InvalidInput, PenstockError, UnknownKey
from penstock.log import OpenList
from penstock.plane.engine import Engine
from penstock.plane.leases import Leases
from penstock.plane.recorder import ends_plane
from penstock.plane.task_book import PromptList
from penstock.protocol import (
    MAX_ARMS,
    MAX_NAME,
    MAX_PROMPTS,
    AddPrompts,
    FromPlane,
    OfferPrompts,
    Peer,
    PromptChunk,
    PromptsOffered,
    check_prompt,
    list_digest,
)
from penstock.replay import read_curriculum

MAX_LISTS = 256
MAX_LIST_NAME = 100
_MAX_EPOCHS = _MAX_ATTEMPTS = 1_000_000
_MAX_REASONS = 64
_MAX_ROWS = 1 << 40
_MISSING = 64
"""Chunks that a client is asked for at a time."""
_PIECE = 4096
"""Prompts of a changed list that are numbered in one turn."""
_UPLOADS = 16
"""Lists that may be on their way at the same time."""
Ticket: TypeAlias = tuple[Peer, int]
Reply: TypeAlias = Callable[[Ticket, FromPlane | PenstockError | None], None]
"""Answers a client: with a message, with an error, or that its request is done."""


@dataclass(slots=True, eq=False)
class _Upload:
    """A list whose prompts are arriving."""

    base: int
    offer: OfferPrompts
    have: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Chunk -> place of its first prompt, and number of prompts."""
    opening: list[Ticket] = field(default_factory=list)
    """Clients to answer once the list is open."""
    behind: list[tuple[Ticket, OfferPrompts]] = field(default_factory=list)
    """Offers of the same prompts under another name or with other settings. They wait until this one is open."""
    numbering: Iterator[bytes] | None = None
    """Numbers the prompts, a piece with each call. The last item is the numbers of all."""


class PromptLists:
    """Opens and changes the lists of a plane."""

    def __init__(self, engine: Engine, leases: Leases, reply: Reply) -> None:
        self._engine, self._leases, self._reply = engine, leases, reply
        self._uploads: dict[bytes, _Upload] = {}
        self._to_open: deque[_Upload] = deque()
        """Lists whose prompts are all here."""

    @property
    def _lists(self) -> dict[str, PromptList]:
        return self._engine.state.tasks.lists

    def offer(self, ticket: Ticket, offer: OfferPrompts) -> None:
        _check_offer(offer)
        current = self._lists.get(offer.list)
        _check_same_order(offer, current)
        if current is None and len(self._lists) >= MAX_LISTS:
            raise InvalidInput(f"list {offer.list!r}: this run has {MAX_LISTS} lists; use one of them again")
        if current is not None and current.opened.digest == offer.digest:
            opened = _opened(offer, current.opened.base, current.opened.places, current.opened.since)
            if opened == current.opened:
                self._reply(ticket, PromptsOffered(ticket=offer.ticket))
            else:
                self._leases.decide(opened, partial(self._when_open, [ticket]))
            return
        upload = self._uploads.get(offer.digest) or self._begin(offer)
        if upload.opening and _settings(offer) == _settings(upload.offer):
            upload.opening.append(ticket)
            return
        if upload.opening:
            upload.behind.append((ticket, offer))
            return
        missing = tuple(islice((n for n in range(len(offer.chunks)) if n not in upload.have), _MISSING))
        if missing:
            self._reply(ticket, PromptsOffered(ticket=offer.ticket, missing=missing))
            return
        _check_tiled(upload)
        upload.offer = offer
        upload.opening.append(ticket)
        self._to_open.append(upload)

    def _begin(self, offer: OfferPrompts) -> _Upload:
        """Reserve rows for a list, behind those of open lists and other uploads. Rows that are there already are of
        uploads that were given up, here or by an earlier plane."""
        log = self._engine.log
        idle = [digest for digest, upload in self._uploads.items() if not upload.opening]
        if len(self._uploads) >= _UPLOADS and idle:
            del self._uploads[idle[0]]
        ends = [base + count for one in self._lists.values() for base, count, _ in one.versions]
        ends += [upload.base + upload.offer.count for upload in self._uploads.values()]
        base = max(ends, default=1)
        if base + offer.count > _MAX_ROWS:
            raise InvalidInput(f"list {offer.list!r}: this run has no room for {offer.count:,} more prompts")
        with log.transaction():  # `add_prompts` keeps rows that exist, so leftovers must go first
            log.remove_prompts(base)
        upload = self._uploads[offer.digest] = _Upload(base, offer)
        return upload

    def add(self, message: AddPrompts) -> None:
        upload = self._uploads.get(message.digest)
        if upload is None:
            raise UnknownKey("prompts: of a list that was not offered to this plane; offer it first")
        chunks, chunk = upload.offer.chunks, PromptChunk(message.first, message.names, message.payloads)
        count = len(chunk.names)
        if not 0 <= message.chunk < len(chunks) or not 0 <= chunk.first <= upload.offer.count - count:
            raise InvalidInput(f"prompts: chunk {message.chunk} from {chunk.first} on is outside the list")
        if not count or len(chunk.payloads) != count or chunk.digest != chunks[message.chunk]:
            raise InvalidInput(f"prompts: chunk {message.chunk} is not the one that was offered")
        for name, payload in zip(chunk.names, chunk.payloads, strict=True):
            check_prompt(name, payload)
        log = self._engine.log
        size = sum(map(len, chunk.payloads)) + sum(map(len, chunk.names))
        log.disk.check(size, lambda: log.used_bytes + self._engine.segments.num_bytes)
        with log.transaction():
            log.add_prompts(upload.base + chunk.first, list(zip(chunk.names, chunk.payloads, strict=True)))
        upload.have[message.chunk] = (chunk.first, count)

    @property
    def is_opening(self) -> bool:
        """Whether the next turn goes on opening a list."""
        return bool(self._to_open)

    def open_next(self) -> None:
        """Open the list that arrived first. One list per turn: the version that a changed list is compared with must be
        in the log. A large list takes several turns, so heartbeats do not wait for it."""
        if not self._to_open:
            return
        upload, offer = self._to_open[0], self._to_open[0].offer
        try:
            current = self._lists.get(offer.list)
            _check_same_order(offer, current)
            since = self._engine.state.outcomes.last if current is None else current.opened.since
            upload.numbering = upload.numbering or (self._numbering(current, upload) if current else iter((b"",)))
            places = next(upload.numbering)
            if current is not None and not places:
                return
        except PenstockError as error:
            if ends_plane(error):
                raise
            self._to_open.popleft()
            upload.numbering = None
            self._opened(upload, error)
            return
        self._to_open.popleft()
        upload.numbering = None
        self._leases.decide(_opened(offer, upload.base, places, since), partial(self._opened, upload))

    def _numbering(self, current: PromptList, upload: _Upload) -> Iterator[bytes]:
        """Number the prompts of a changed list: known names keep their number. Yields b"" after each piece."""
        log, numbers = self._engine.log, dict[str, int]()
        for base, count, places in current.versions:
            known = np.frombuffer(places, "<u4") if places else np.arange(count)
            for first in range(0, count, _PIECE):
                some = known[first : first + _PIECE].tolist()
                numbers |= zip(log.prompt_names(base + first, len(some)), some, strict=True)
                yield b""
        found, new = list[int](), iter(range(current.known, MAX_PROMPTS + current.known))
        for first in range(0, upload.offer.count, _PIECE):
            names = log.prompt_names(upload.base + first, min(_PIECE, upload.offer.count - first))
            found += [numbers[name] if name in numbers else next(new) for name in names]
            yield b""
        if len(set(found)) < len(found):
            raise InvalidInput(f"list {upload.offer.list!r}: two prompts have the same name")
        yield np.array(found, "<u4").tobytes()

    def _opened(self, upload: _Upload, error: PenstockError | None) -> None:
        tickets, upload.opening = upload.opening, []
        if error is None:
            self._uploads.pop(upload.offer.digest, None)
        self._when_open(tickets, error)
        behind, upload.behind = upload.behind, []
        for ticket, offer in behind:
            try:
                self.offer(ticket, offer)
            except PenstockError as problem:
                if ends_plane(problem):
                    raise
                self._reply(ticket, problem)

    def _when_open(self, tickets: list[Ticket], error: PenstockError | None) -> None:
        for ticket in tickets:
            self._reply(ticket, PromptsOffered(ticket=ticket[1]) if error is None else error)


def _settings(offer: OfferPrompts) -> OfferPrompts:
    """Return an offer without its ticket, to compare offers of different workers."""
    return msgspec.structs.replace(offer, ticket=0)


def _opened(offer: OfferPrompts, base: int, places: bytes, since: int) -> OpenList:
    return OpenList(
        list=offer.list,
        digest=offer.digest,
        base=base,
        count=offer.count,
        epochs=offer.epochs,
        seed=offer.seed,
        shuffle=offer.shuffle,
        attempts=offer.attempts,
        again=offer.again,
        tenant=offer.tenant,
        places=places,
        max_expiries=offer.max_expiries,
        order=offer.order,
        parameters=offer.parameters,
        arms=offer.arms,
        arm_of=offer.arm_of,
        since=since,
    )


def _check_same_order(offer: OfferPrompts, current: PromptList | None) -> None:
    """Raise InvalidInput for an open list that is offered with another order. Arms follow the list."""
    if current is None:
        return
    asked, has = (
        f"{one.order} {one.parameters.decode()}" if one.order else f"Sequential(shuffle={one.shuffle})"
        for one in (offer, current.opened)
    )
    if asked != has:
        raise InvalidInput(
            f"list {offer.list!r}: is in the order {has[:200]}, and is asked for in the order {asked[:200]}; give the "
            "same order= in every worker, or begin another list with name="
        )


def _check_order(offer: OfferPrompts) -> None:
    """Raise InvalidInput for a curriculum that cannot be made."""
    name, arms = offer.list, offer.arms
    if offer.order:
        read_curriculum(offer.order, offer.parameters, None)
    if not arms and not offer.arm_of:
        return
    if offer.order != "Thompson" or len(arms) > MAX_ARMS or any(not 0 < len(arm) <= MAX_TEXT for arm in arms):
        raise InvalidInput(
            f"list {name!r}: {len(arms):,} arms; give at most {MAX_ARMS:,}, with names of 1 to {MAX_TEXT} characters, "
            "and only to Thompson"
        )
    if len(offer.arm_of) != 2 * offer.count or int(np.frombuffer(offer.arm_of, "<u2").max()) >= len(arms):
        raise InvalidInput(f"list {name!r}: arm_of: does not name one of {len(arms):,} arms for each prompt")


def _check_tiled(upload: _Upload) -> None:
    """Raise unless the chunks of a list follow one another."""
    at = 0
    for first, count in (upload.have[number] for number in range(len(upload.offer.chunks))):
        if first != at:
            raise InvalidInput(f"list {upload.offer.list!r}: a chunk begins at {first}, must begin at {at}")
        at += count
    if at != upload.offer.count:
        raise InvalidInput(f"list {upload.offer.list!r}: {at} prompts in its chunks, {upload.offer.count} offered")


def _check_offer(offer: OfferPrompts) -> None:
    """Raise InvalidInput for a list that the plane does not take."""
    name = offer.list
    if not 0 < len(name) <= MAX_LIST_NAME or not name.isprintable():
        raise InvalidInput(f"list {name[:40]!r}: give it a printable name of 1 to {MAX_LIST_NAME} characters")
    if offer.tenant and (problem := run_name_problem(offer.tenant)):
        raise InvalidInput(f"list {name!r}: tenant: {problem}")
    for field_name, value, least, most in (
        ("count", offer.count, 1, MAX_PROMPTS),
        ("epochs", offer.epochs, 1, _MAX_EPOCHS),
        ("seed", offer.seed, 0, (1 << 63) - 1),
        ("attempts", offer.attempts, 1, _MAX_ATTEMPTS),
        ("max_expiries", 1 if offer.max_expiries is None else offer.max_expiries, 1, _MAX_ATTEMPTS),
        ("chunks", len(offer.chunks), 1, offer.count),
        ("again", len(offer.again), 0, _MAX_REASONS),
    ):
        if not least <= value <= most:
            raise InvalidInput(f"list {name!r}: {field_name}: {value:,}; give from {least:,} to {most:,}")
    if any(len(reason) > MAX_NAME for reason in offer.again):
        raise InvalidInput(f"list {name!r}: again: a reason has at most {MAX_NAME} characters")
    _check_order(offer)
    if any(len(digest) != 16 for digest in offer.chunks) or list_digest(offer.chunks) != offer.digest:
        raise InvalidInput(f"list {name!r}: its digest does not follow from those of its chunks")
