"""Groups on their way in: each frame is checked once, its facts are made, and it is kept.

This is the work of a put that depends on its size; it runs beside the loop that answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import xxhash

from penstock.arrays.columns import Column
from penstock.arrays.own_columns import words_for
from penstock.encode import Limits, front_size, read_head
from penstock.encode.layout import frame_size
from penstock.encode.reading import describe
from penstock.errors import CorruptFrame, InvalidInput, PenstockError, StorageError
from penstock.keep.facts import GroupFacts, check_group, join_facts
from penstock.pack import plan
from penstock.send.messages import Buffer
from penstock.serve.decisions.evaluations import EvalFacts
from penstock.serve.decisions.over_length import NONE, OverLength, check_lengths, facts_for
from penstock.serve.decisions.untrained import check_trained
from penstock.serve.settings import PlaneSettings
from penstock.storage import Storage, Writer, parse_location

UNCUT = 2**40
"""Tokens: no sample is so long."""
_READ_BACK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Incoming:
    """A group that is to be checked and kept."""

    group: str
    frame: Buffer
    evaluation: bool = False
    """Whether it was put to be looked at, and not to be trained."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A group whose frame its sender has written to storage, and vouches for."""

    group: str
    digest: bytes
    location: str
    metadata: bytes
    shown: bytes = b""
    """Of an evaluation group."""
    evaluation: bool = False
    read_back: bool = False
    """Whether the plane must see the frame itself before it counts."""


class Unseen(StorageError):
    """The plane does not find in storage what a client says it wrote there: the client sees another storage."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A group that is checked and kept: only the decision to accept it is missing."""

    group: str
    facts: GroupFacts
    location: str
    eval_facts: EvalFacts | None = None
    """Of an evaluation group."""
    over_length: OverLength = NONE
    """What was truncated or dropped of its samples."""
    metadata: bytes = b""
    """The facts as they came, where the log may take them as they are."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """A group of which nothing is left: every sample is longer than `seq_len`, and `over_length` is "drop"."""

    group: str
    over_length: OverLength
    location: str = ""
    """Where its sender has written it."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A group that is not accepted."""

    group: str
    error: PenstockError
    location: str = ""
    """Where its sender has written it."""


class Intake:
    """Checks frames, and writes those that pass, with one sync for all of a batch."""

    def __init__(self, settings: PlaneSettings, writer: Writer) -> None:
        self._settings, self._writer = settings, writer
        self._storage = cast(Storage, writer.storage)  # the plane reads what it writes
        self.limits = limits_of(settings)

    def run_of(self, frame: Buffer) -> str:
        """The run that a group says it belongs to, found without reading its body."""
        return next(iter(read_head(frame, limits=self.limits).text["run"]), "")

    def look_at(self, stored: Stored, *, may_read: bool = True) -> Arrived | Dropped | Refused | None:
        """What becomes of a group that a client has written to storage. None: it must be read to know that, and
        `may_read` is False."""
        try:
            facts = self._facts_of(stored)
            if not (stored.evaluation or facts.fits(self._settings.packing.seq_len)):
                # Its sender attached to a plane with another seq_len: this one reads the frame itself.
                if not may_read:
                    return None
                facts = facts_for(self._settings, facts, self._storage.read(stored.location)[0])
            shown = None
            if stored.evaluation:
                shown = EvalFacts.from_bytes(stored.shown)
                self._check_own(facts)
            else:
                self._check_facts(facts)
            if stored.read_back:
                self._read_back(stored)
        except PenstockError as error:
            return Refused(stored.group, error, stored.location)
        except Exception as error:  # noqa: BLE001 - metadata must not end the plane, whatever it provokes
            words = f"group {stored.group!r}: {type(error).__name__}: {error}; its metadata cannot be used"
            return Refused(stored.group, InvalidInput(words), stored.location)
        found = NONE if stored.evaluation else OverLength.of(facts)
        if not stored.evaluation and self._is_dropped(facts):
            return Dropped(stored.group, found, stored.location)
        same = not stored.evaluation and facts.seq_len == self._settings.packing.seq_len
        return Arrived(stored.group, facts, stored.location, shown, found, stored.metadata if same else b"")

    def _facts_of(self, stored: Stored) -> GroupFacts:
        """Metadata that belongs to the frame at its location, within the plane's limits."""
        facts, size = GroupFacts.from_bytes(stored.metadata), parse_location(stored.location).size
        name = f"group {stored.group!r}"
        if facts.group != stored.group or not facts.num_samples:
            raise CorruptFrame(f"{name}: the metadata is of group {facts.group!r}, {facts.num_samples} samples")
        # Only the sizes: what else the front says is checked by the rank that reads with it.
        if not facts.size == frame_size(facts.front) == size or front_size(facts.front) != len(facts.front):
            raise CorruptFrame(
                f"{name}: metadata of a frame of {facts.size} bytes, front of {len(facts.front)}, at a location of "
                f"{size}; they must agree"
            )
        if facts.num_tokens > self.limits.max_tokens or facts.num_samples > self.limits.max_samples:
            raise InvalidInput(
                f"{name}: {facts.num_tokens:,} tokens in {facts.num_samples:,} samples; at most "
                f"{self.limits.max_tokens:,} (max_group_tokens) in {self.limits.max_samples:,}"
            )
        return facts

    def _read_back(self, stored: Stored) -> None:
        """The first frame of a segment: a wrong mount or a copied folder is found before anything is acknowledged."""
        size, state = parse_location(stored.location).size, xxhash.xxh3_128()
        try:
            # In pieces, so that the plane's memory does not grow with the frame. It is not faster.
            for a in range(0, size, _READ_BACK_BYTES):
                state.update(self._storage.read(stored.location, [(a, min(a + _READ_BACK_BYTES, size))])[0])
        except CorruptFrame as error:
            raise Unseen(f"group {stored.group!r}: not in the plane's storage: {error}") from None
        if state.digest() != stored.digest:
            raise Unseen(f"group {stored.group!r}: other bytes are in the plane's storage than were written")

    def take(self, batch: Sequence[Incoming]) -> list[Arrived | Dropped | Refused]:
        """What became of each group, in order."""
        checked = [self._check(incoming) for incoming in batch]
        good = [one.frame for one, found in zip(batch, checked, strict=True) if isinstance(found, Arrived)]
        try:
            locations = iter(self._writer.write([[frame] for frame in good]) if good else ())
        except StorageError as error:
            return [Refused(found.group, error) if isinstance(found, Arrived) else found for found in checked]
        return [replace(found, location=next(locations)) if isinstance(found, Arrived) else found for found in checked]

    def _check(self, incoming: Incoming) -> Arrived | Dropped | Refused:
        """As it will be, but for where its frame is kept."""
        group, frame = incoming.group, incoming.frame
        try:
            if incoming.evaluation:
                facts, eval_facts = self.check_evaluation(group, frame)
                return Arrived(group, facts, "", eval_facts)
            facts = self.check(group, frame)
            found = OverLength.of(facts)
            if self._is_dropped(facts):
                return Dropped(group, found)
            return Arrived(group, facts, "", over_length=found)
        except PenstockError as error:
            return Refused(group, error)
        except Exception as error:  # noqa: BLE001 - a frame must not end the plane, whatever it provokes
            words = f"group {group!r}: {type(error).__name__}: {error}; its frame cannot be read"
            return Refused(group, InvalidInput(words))

    def check(self, group: str, frame: Buffer) -> GroupFacts:
        """The facts of a frame; raises what is wrong with it."""
        drop, seq_len = self._settings.over_length == "drop", self._settings.packing.seq_len
        facts = check_group(frame, group=group, seq_len=seq_len, limits=self.limits, drop=drop)
        self._check_facts(facts)
        return facts

    def _check_facts(self, facts: GroupFacts) -> None:
        """Raise what this plane's settings have against a group that is to be trained."""
        packing = self._settings.packing
        if self._settings.over_length == "reject":
            check_lengths(facts)
        self._check_own(facts)
        self._check_required(facts)
        if self._settings.untrained_groups == "reject" and not self._is_dropped(facts):
            check_trained(facts)
        most = self._settings.replay.max_staleness
        if facts.policy_version is None and most is not None:
            raise InvalidInput(
                f"group {facts.group!r}: no policy_version, and max_staleness is {most}; "
                "say which policy sampled it: plane.group(..., policy_version=plane.policy_version)"
            )
        if packing.over_cap == "strict":
            plan(join_facts([facts]), packing)  # a sample beyond a cap is found now, not when its step is planned

    def _is_dropped(self, facts: GroupFacts) -> bool:
        """Whether `over_length` leaves nothing of a group."""
        return self._settings.over_length == "drop" and not any(facts.kept)

    def check_evaluation(self, group: str, frame: Buffer) -> tuple[GroupFacts, EvalFacts]:
        """The facts of an evaluation group. What only training asks for (`requires`, a policy version, a sample's
        length) is not asked of it."""
        facts, eval_facts = facts_for_evaluation(group, frame, self.limits)
        self._check_own(facts)
        return facts, eval_facts

    def _check_own(self, facts: GroupFacts) -> None:
        for name, description in facts.own.items():
            column, known = Column.of(name, description), self._settings.packing.own.get(name)
            if known is None:
                raise InvalidInput(
                    f"group {facts.group!r}: column {name!r} ({words_for(column)}), which this plane was not told of; "
                    f"open it with columns=[penstock.Column({name!r}, ...)]"
                )
            if not known.is_like(column):
                raise InvalidInput(
                    f"group {facts.group!r}: column {name!r} is {words_for(column)}, and this plane was told of "
                    f"{words_for(known)}; put samples, not frames that were encoded without the plane"
                )

    def _check_required(self, facts: GroupFacts) -> None:
        for name in self._settings.requires:
            lacking = _lacking(facts, name)
            if lacking:
                raise InvalidInput(
                    f"group {facts.group!r}: no {name} in sample {lacking[0]!r} ({len(lacking)} of {facts.num_samples} "
                    "samples), which this plane requires of every trained sample; record it, or open the plane without "
                    "it in `requires`"
                )


def _lacking(facts: GroupFacts, name: str) -> list[str]:
    """The trained samples without a column; of a group that trains nothing, all samples without it."""
    trained = np.frombuffer(facts.kept_loss_tokens, "<i8") > 0
    if not trained.any():
        trained = np.ones(facts.num_samples, np.bool_)
    has = np.zeros(facts.num_samples, np.bool_)
    if name in facts.columns:
        table = np.frombuffer(facts.has, np.bool_).reshape(facts.num_samples, -1)
        has = table[:, facts.columns.index(name)]
    return [facts.ids[i] for i in np.flatnonzero(trained & ~has).tolist()]


def facts_for_evaluation(group: str, frame: Buffer, limits: Limits) -> tuple[GroupFacts, EvalFacts]:
    """Of a group that is not to be trained: its samples are not cut, and what is shown of it is made too."""
    facts = check_group(frame, group=group, seq_len=UNCUT, limits=limits)
    _, samples, _ = describe(frame, limits=limits)
    return facts, EvalFacts.of(samples)


def limits_of(settings: PlaneSettings) -> Limits:
    """What one group may unfold to."""
    tokens = settings.max_group_tokens or max(256 * settings.packing.seq_len, 1 << 20)
    return Limits(max_tokens=tokens, max_bytes=settings.max_group_bytes or 2 << 30, max_samples=1 << 16)
