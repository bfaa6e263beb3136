"""What the plane's loop does with its keepers: their messages, facts that come in, groups that are lost."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from penstock.errors import CorruptFrame, DiskFull, InvalidInput, PenstockError
from penstock.keep.facts import GroupFacts
from penstock.send.carrier import Peer, PlaneCarrier
from penstock.send.copies import NAME, location_of
from penstock.send.effects import Send
from penstock.send.keeper_messages import Copy, Enlist, Enlisted, FromKeeper, KeeperBeat, PutFacts
from penstock.send.keys import PlaneKeys
from penstock.send.messages import Frames, Refused
from penstock.send.roster import Roster
from penstock.serve.decisions.acceptance import Outcome
from penstock.serve.decisions.engine import Engine
from penstock.serve.decisions.evaluations import EvalFacts
from penstock.serve.decisions.intake import Vouched, limits_of
from penstock.serve.decisions.losses import lose, lost_groups
from penstock.serve.process.pipeline import Pipeline
from penstock.serve.settings import PlaneSettings

logger = logging.getLogger("penstock.plane")
_MAX_NAMED = 20
_MAX_COPIES = 16
_MAX_NUMBER = 10**18


class KeeperDesk:
    """Answers keepers."""

    def __init__(self, roster: Roster, engine: Engine, pipeline: Pipeline) -> None:
        self._roster, self._engine, self._pipeline = roster, engine, pipeline
        self._copies: dict[object, tuple[Copy, ...]] = {}
        """Facts that are not answered yet, by ticket -> where their frames are."""

    def on_message(
        self, peer: Peer, message: FromKeeper, frames: Frames, now: float, *, is_keeper: bool
    ) -> list[Send] | Outcome | None:
        """What to send; or, for facts, what became of them, if that is known at once."""
        if not is_keeper:
            words = "only keepers may vouch for facts, and this key is not a keeper's; see `penstock keys --keeper`"
            if isinstance(message, PutFacts):
                return Outcome((peer, message.ticket), InvalidInput(f"group {message.group[:80]!r}: {words}"))
            return [Send(peer, Refused(epoch=self._roster.terms.epoch, reason=words))]
        if isinstance(message, Enlist):
            logger.info("keeper %s of node %s enlists at %s", message.name, message.node, message.url)
            return self._roster.on_enlist(peer, message, frames, now)
        if isinstance(message, KeeperBeat):
            return self._roster.on_beat(peer, message, now)
        return self._on_facts((peer, message.ticket), message)

    def _on_facts(self, ticket: tuple[Peer, int], message: PutFacts) -> Outcome | None:
        try:
            _check_copies(message)
            self._copies[ticket] = message.copies
            facts = GroupFacts.from_bytes(message.facts)
            if facts.group != message.group or not facts.num_samples:
                raise CorruptFrame(f"group {message.group!r}: facts of group {facts.group!r}")
            shown = EvalFacts.from_bytes(message.evaluation) if message.evaluation else None
        except PenstockError as error:
            return Outcome(ticket, error)
        vouched = Vouched(message.group, facts, location_of(message.copies), shown)
        return self._pipeline.put_facts(ticket, vouched, message.digest, message.size)

    def on_outcome(self, outcome: Outcome) -> None:
        """Facts are answered: copies that the log does not name are wanted by nobody."""
        self._roster.refuse(self._copies.pop(outcome.ticket, ()))

    def look(self, now: float) -> tuple[int, str] | None:
        """Whether a keeper is gone for good, and with it what only it had. The first step that is planned anew
        because of that, and why."""
        self._roster.policy_version = self._engine.policy_version
        self._roster.tick(now)
        roster, engine = self._roster, self._engine
        if not roster.has_news or engine.state.is_drawing:
            return None
        lost = lost_groups(engine, roster)
        names = {op: engine.state.rows[op].id for op in lost}
        try:
            found = lose(engine, lost) if lost else None
        except DiskFull:
            return None  # the next turn looks again
        roster.has_news = False
        for op, why in list(lost.items())[:_MAX_NAMED]:
            logger.warning("group %r is lost, one of %d: %s", names[op], len(lost), why)
        if found is not None:
            self._pipeline.unplanned(found[0])
        return found


def _check_copies(message: PutFacts) -> None:
    """Raise unless these can be written down."""
    names = [name for name, _ in message.copies]
    good = 0 < len(names) == len(set(names)) <= _MAX_COPIES and message.size >= 0
    if not good or not all(NAME.fullmatch(name) and 0 < number < _MAX_NUMBER for name, number in message.copies):
        raise InvalidInput(f"group {message.group[:80]!r}: {message.size} bytes, copies {str(message.copies)[:200]}")


def roster_of(settings: PlaneSettings, epoch: int, carriers: Sequence[PlaneCarrier]) -> Roster | None:
    """Of a plane that has keepers; None for one that keeps frames itself. Keepers let in whom these carriers do."""
    if not settings.copies:
        return None
    limits = limits_of(settings)
    keys = [found for carrier in carriers if isinstance(found := getattr(carrier, "keys", None), PlaneKeys)]
    terms = Enlisted(
        epoch=epoch,
        copies=1 if settings.copies == "shared" else settings.copies,
        is_shared=settings.copies == "shared",
        seq_len=settings.packing.seq_len,
        max_tokens=limits.max_tokens,
        max_bytes=limits.max_bytes,
        max_samples=limits.max_samples,
        clients=tuple(sorted({key for found in keys for key in (found.public, *found.allowed)})),  # the plane archives
        keepers=tuple(sorted({key for found in keys for key in found.keepers})),
    )
    return Roster(terms, settings.timeouts)
