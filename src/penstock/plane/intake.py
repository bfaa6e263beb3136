"""Groups on their way in: each frame is checked once, its metadata are made, and it is kept.

This is the work of a put that depends on its size; it runs beside the loop that answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import xxhash

from penstock.arrays import Column, words_for
from penstock.errors import CorruptFrame, InvalidInput, PenstockError, StorageError
from penstock.frames import (
    EvalMetadata,
    GroupMetadata,
    Limits,
    check_group,
    frame_size,
    front_size,
    join_metadata,
    metadata_for_evaluation,
    read_head,
)
from penstock.packing import plan
from penstock.plane.over_length import NONE, OverLength, check_lengths, metadata_for
from penstock.plane.settings import PlaneSettings
from penstock.plane.untrained import check_trained
from penstock.protocol import Buffer
from penstock.storage import Storage, Writer, parse_location

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
    metadata: GroupMetadata
    location: str
    eval_metadata: EvalMetadata | None = None
    """Of an evaluation group."""
    over_length: OverLength = NONE
    """What was truncated or dropped of its samples."""
    raw_metadata: bytes = b""
    """The metadata as they came, where the log may take them as they are."""


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
            metadata = self._metadata_of(stored)
            if not (stored.evaluation or metadata.fits(self._settings.packing.seq_len)):
                # Its sender attached to a plane with another seq_len: this one reads the frame itself.
                if not may_read:
                    return None
                metadata = metadata_for(self._settings, metadata, self._storage.read(stored.location)[0])
            shown = None
            if stored.evaluation:
                shown = EvalMetadata.from_bytes(stored.shown)
                self._check_own(metadata)
            else:
                self._check_metadata(metadata)
            if stored.read_back:
                self._read_back(stored)
        except PenstockError as error:
            return Refused(stored.group, error, stored.location)
        except Exception as error:  # noqa: BLE001 - metadata must not end the plane, whatever it provokes
            words = f"group {stored.group!r}: {type(error).__name__}: {error}; its metadata cannot be used"
            return Refused(stored.group, InvalidInput(words), stored.location)
        found = NONE if stored.evaluation else OverLength.of(metadata)
        if not stored.evaluation and self._is_dropped(metadata):
            return Dropped(stored.group, found, stored.location)
        same = not stored.evaluation and metadata.seq_len == self._settings.packing.seq_len
        return Arrived(stored.group, metadata, stored.location, shown, found, stored.metadata if same else b"")

    def _metadata_of(self, stored: Stored) -> GroupMetadata:
        """Metadata that belongs to the frame at its location, within the plane's limits."""
        metadata, size = GroupMetadata.from_bytes(stored.metadata), parse_location(stored.location).size
        name = f"group {stored.group!r}"
        if metadata.group != stored.group or not metadata.num_samples:
            raise CorruptFrame(f"{name}: the metadata is of group {metadata.group!r}, {metadata.num_samples} samples")
        # Only the sizes: what else the front says is checked by the rank that reads with it.
        if not metadata.size == frame_size(metadata.front) == size or front_size(metadata.front) != len(metadata.front):
            raise CorruptFrame(
                f"{name}: metadata of a frame of {metadata.size} bytes, front of {len(metadata.front)}, at a location "
                f"of {size}; they must agree"
            )
        if metadata.num_tokens > self.limits.max_tokens or metadata.num_samples > self.limits.max_samples:
            raise InvalidInput(
                f"{name}: {metadata.num_tokens:,} tokens in {metadata.num_samples:,} samples; at most "
                f"{self.limits.max_tokens:,} (max_group_tokens) in {self.limits.max_samples:,}"
            )
        return metadata

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
                metadata, eval_metadata = self.check_evaluation(group, frame)
                return Arrived(group, metadata, "", eval_metadata)
            metadata = self.check(group, frame)
            found = OverLength.of(metadata)
            if self._is_dropped(metadata):
                return Dropped(group, found)
            return Arrived(group, metadata, "", over_length=found)
        except PenstockError as error:
            return Refused(group, error)
        except Exception as error:  # noqa: BLE001 - a frame must not end the plane, whatever it provokes
            words = f"group {group!r}: {type(error).__name__}: {error}; its frame cannot be read"
            return Refused(group, InvalidInput(words))

    def check(self, group: str, frame: Buffer) -> GroupMetadata:
        """The metadata of a frame; raises what is wrong with it."""
        drop, seq_len = self._settings.over_length == "drop", self._settings.packing.seq_len
        metadata = check_group(frame, group=group, seq_len=seq_len, limits=self.limits, drop=drop)
        self._check_metadata(metadata)
        return metadata

    def _check_metadata(self, metadata: GroupMetadata) -> None:
        """Raise what this plane's settings have against a group that is to be trained."""
        packing = self._settings.packing
        if self._settings.over_length == "reject":
            check_lengths(metadata)
        self._check_own(metadata)
        self._check_required(metadata)
        if self._settings.untrained_groups == "reject" and not self._is_dropped(metadata):
            check_trained(metadata)
        most = self._settings.replay.max_staleness
        if metadata.policy_version is None and most is not None:
            raise InvalidInput(
                f"group {metadata.group!r}: no policy_version, and max_staleness is {most}; "
                "say which policy sampled it: plane.group(..., policy_version=plane.policy_version)"
            )
        if packing.over_cap == "strict":
            plan(join_metadata([metadata]), packing)  # a sample beyond a cap is found now, not when its step is planned

    def _is_dropped(self, metadata: GroupMetadata) -> bool:
        """Whether `over_length` leaves nothing of a group."""
        return self._settings.over_length == "drop" and not any(metadata.kept)

    def check_evaluation(self, group: str, frame: Buffer) -> tuple[GroupMetadata, EvalMetadata]:
        """The metadata of an evaluation group. What only training asks for (`requires`, a policy version, a sample's
        length) is not asked of it."""
        metadata, eval_metadata = metadata_for_evaluation(group, frame, self.limits)
        self._check_own(metadata)
        return metadata, eval_metadata

    def _check_own(self, metadata: GroupMetadata) -> None:
        for name, description in metadata.own.items():
            column, known = Column.of(name, description), self._settings.packing.own.get(name)
            if known is None:
                raise InvalidInput(
                    f"group {metadata.group!r}: column {name!r} ({words_for(column)}), which this plane was not told "
                    f"of; open it with columns=[penstock.Column({name!r}, ...)]"
                )
            if not known.is_like(column):
                raise InvalidInput(
                    f"group {metadata.group!r}: column {name!r} is {words_for(column)}, and this plane was told of "
                    f"{words_for(known)}; put samples, not frames that were encoded without the plane"
                )

    def _check_required(self, metadata: GroupMetadata) -> None:
        for name in self._settings.requires:
            lacking = _lacking(metadata, name)
            if lacking:
                raise InvalidInput(
                    f"group {metadata.group!r}: no {name} in sample {lacking[0]!r} ({len(lacking)} of "
                    f"{metadata.num_samples} samples), which this plane requires of each trained sample; record it, or "
                    "open the plane without it in `requires`"
                )


def _lacking(metadata: GroupMetadata, name: str) -> list[str]:
    """The trained samples without a column; of a group that trains nothing, all samples without it."""
    trained = np.frombuffer(metadata.kept_loss_tokens, "<i8") > 0
    if not trained.any():
        trained = np.ones(metadata.num_samples, np.bool_)
    has = np.zeros(metadata.num_samples, np.bool_)
    if name in metadata.columns:
        table = np.frombuffer(metadata.has, np.bool_).reshape(metadata.num_samples, -1)
        has = table[:, metadata.columns.index(name)]
    return [metadata.ids[i] for i in np.flatnonzero(trained & ~has).tolist()]


def limits_of(settings: PlaneSettings) -> Limits:
    """What one group may unfold to."""
    tokens = settings.max_group_tokens or max(256 * settings.packing.seq_len, 1 << 20)
    return Limits(max_tokens=tokens, max_bytes=settings.max_group_bytes or 2 << 30, max_samples=1 << 16)
