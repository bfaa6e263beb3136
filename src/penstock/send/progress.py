"""How far the steps of a session are: which process has which step, and which is trained by whom."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.send.effects import Staged
from penstock.send.members import Place


class Progress:
    """The steps that are not yet committed by all `places` processes. Steps are received, released, committed."""

    def __init__(self, places: int, left: Mapping[Place, int]) -> None:
        self._places = places
        self.staged: dict[int, Staged] = {}
        """Steps that somebody may still have to be sent."""
        self.digests: dict[int, list[str]] = {}
        """By rank; of steps that were staged, also when they need not be sent any more."""
        self.left = dict(left)
        """Processes that left, and the last step that each of them committed."""
        self._received: dict[int, dict[Place, str]] = {}
        self._released: set[int] = set()
        self._committed: dict[int, set[Place]] = {}
        self._versions: dict[int, int] = {}

    def new_session(self) -> None:
        self._received, self._released, self._committed, self._versions, self.left = {}, set(), {}, {}, {}

    def begin_at(self, step: int) -> None:
        """What comes before counts as trained; what was released to an earlier session must be made again."""
        self.staged = {number: staged for number, staged in self.staged.items() if number >= step}
        self.digests = {number: staged.digests for number, staged in self.staged.items()}

    def stage(self, staged: Staged) -> None:
        self.staged[staged.step], self.digests[staged.step] = staged, staged.digests

    # -------------------------------------------------------------- received, released

    @property
    def received(self) -> dict[int, dict[Place, str]]:
        """Step -> who says to have it, with which digest."""
        return self._received

    def receive(self, place: Place, step: int, digest: str) -> None:
        self._received.setdefault(step, {})[place] = digest

    def has(self, place: Place, step: int) -> bool:
        return place in self._received.get(step, ())

    def is_released(self, step: int) -> bool:
        return step in self._released

    def altered(self, step: int) -> tuple[int, str] | None:
        """A rank that received something else than was sent, and the digest of that."""
        for (rank, _), digest in self._received.get(step, {}).items():
            if digest != self.digests[step][rank]:
                return rank, digest
        return None

    def release(self, step: int) -> bool:
        """Whether every process has the step now; True once."""
        have = len(self._received.get(step, ())) + self._left_behind(step)
        if have < self._places or step in self._released:
            return False
        self._released.add(step)
        self.staged.pop(step)
        return True

    # -------------------------------------------------------------- committed

    def commit(self, place: Place, first: int, last: int, policy_version: int | None) -> None:
        """Steps are committed in order, so one speaks for those before it."""
        for step in range(first, last + 1):
            self._committed.setdefault(step, set()).add(place)
        if policy_version is not None:
            self._versions[last] = max(self._versions.get(last, 0), policy_version)

    def is_committed(self, step: int) -> bool:
        return len(self._committed.get(step, ())) + self._left_behind(step) >= self._places

    def version(self, step: int) -> int | None:
        return self._versions.get(step)

    def done(self, step: int) -> None:
        """It is written down that all have trained the step."""
        for table in (self.staged, self.digests, self._received, self._committed, self._versions):
            table.pop(step, None)
        self._released.discard(step)

    # -------------------------------------------------------------- leaving

    def leave(self, place: Place, next_step: int) -> int:
        """A process wants nothing more; returns the last step it committed. What it trained stays trained; what it
        received and nobody may train yet, nobody will."""
        last = max((step for step, places in self._committed.items() if place in places), default=next_step - 1)
        for places in self._committed.values():
            places.discard(place)
        for step, have in self._received.items():
            if step <= last or step not in self._released:
                have.pop(place, None)
        self.left[place] = last
        return last

    def _left_behind(self, step: int) -> int:
        """How many of those who left have trained a step."""
        return sum(step <= last for last in self.left.values())
