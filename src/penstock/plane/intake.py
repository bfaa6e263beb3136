"""Check groups against the plane's settings, and store the frames of clients that do not write to storage themselves.

A frame is read once, to check it and to make its metadata. That work grows with the frame, so it runs on the intake
thread. Metadata that a client made itself is about a kilobyte and is checked on the loop's thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import xxhash

from penstock.arrays import Column, words_for
from penstock.errors import CorruptFrame, InvalidInput, PenstockError, StorageError
from penstock.frames import (
    WITHOUT,
    Buffer,
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
from penstock.plane.settings import PlaneSettings
from penstock.storage import Writer, parse_location

_READ_BACK_BYTES = 1 << 20
_ACCEPT = "or open the plane with untrained_groups='accept'"


@dataclass(frozen=True, slots=True)
class OverLength:
    """Counts of samples longer than `seq_len`, and of their tokens.

    The setting `over_length` decides. "reject": the put fails and nothing is counted. "truncate": the sample keeps its
    first tokens. "drop": no step takes the sample, and its group is trained without it."""

    truncated_samples: int = 0
    truncated_tokens: int = 0
    dropped_samples: int = 0
    dropped_tokens: int = 0

    def __bool__(self) -> bool:
        return any(self.as_tuple())

    def as_tuple(self) -> tuple[int, int, int, int]:
        return self.truncated_samples, self.truncated_tokens, self.dropped_samples, self.dropped_tokens

    @staticmethod
    def of(metadata: GroupMetadata) -> OverLength:
        """Count what a group loses to the `seq_len` that its metadata was made for.

        Lengths 10, 70, 90 with seq_len 64: truncated, `kept` is 10, 64, 64, so 2 samples lose 32 tokens; dropped,
        `kept` is 10, 0, 0, so 2 samples of 160 tokens go."""
        lengths, kept = _numbers(metadata.lengths), _numbers(metadata.kept)
        gone = kept == 0
        cut = (kept < lengths) & ~gone
        dropped = gone & (lengths > 0)
        return OverLength(
            truncated_samples=int(cut.sum()),
            truncated_tokens=int((lengths - kept)[cut].sum()),
            dropped_samples=int(dropped.sum()),
            dropped_tokens=int(lengths[dropped].sum()),
        )

    @staticmethod
    def total(found: Iterable[OverLength]) -> OverLength:
        columns = zip(*[one.as_tuple() for one in found], strict=True)
        return OverLength(*map(sum, columns))

    def since(self, before: OverLength) -> OverLength:
        """Return what was lost beyond an earlier count of the same samples."""
        pairs = zip(self.as_tuple(), before.as_tuple(), strict=True)
        return OverLength(*(max(now - then, 0) for now, then in pairs))

    def __str__(self) -> str:
        """
        >>> str(OverLength(2, 40, 0, 0)), str(OverLength(1, 5, 1, 90))
        ('2 samples truncated by 40 tokens', '1 sample truncated by 5 tokens, 1 sample of 90 tokens dropped')
        """
        parts = []
        if self.truncated_samples:
            parts.append(f"{_samples(self.truncated_samples)} truncated by {self.truncated_tokens:,} tokens")
        if self.dropped_samples:
            parts.append(f"{_samples(self.dropped_samples)} of {self.dropped_tokens:,} tokens dropped")
        return ", ".join(parts) or "none"


NONE = OverLength()


def _numbers(data: bytes) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.frombuffer(data, "<i8")


def _samples(count: int) -> str:
    return f"{count:,} sample{'s' * (count != 1)}"


@dataclass(frozen=True, slots=True)
class Incoming:
    """A group that is to be checked and kept."""

    group: str
    frame: Buffer
    evaluation: bool = False
    """Put for evaluation, never trained."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A group whose frame and metadata a client made and wrote to storage."""

    group: str
    digest: bytes
    location: str
    metadata: bytes
    shown: bytes = b""
    """`EvalMetadata` of an evaluation group, as it was sent."""
    evaluation: bool = False
    read_back: bool = False
    """The plane must read the frame before it counts: it is the first of its segment."""


class Unseen(StorageError):
    """The plane does not find a frame that a client wrote: the client sees another storage."""


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
    """Checks groups, and writes frames that pass with one sync per batch."""

    def __init__(self, settings: PlaneSettings, writer: Writer) -> None:
        self._settings, self._writer, self._storage = settings, writer, writer.storage
        self.limits = limits_of(settings)

    def run_of(self, frame: Buffer) -> str:
        """Return the tenant that a frame names, without reading its body."""
        return next(iter(read_head(frame, limits=self.limits).text["run"]), "")

    def look_at(self, stored: Stored, *, may_read: bool = True) -> Arrived | Dropped | Refused | None:
        """Check a group that a client wrote to storage. Returns None if the frame must be read for that and `may_read`
        is False."""
        try:
            metadata = self._metadata_of(stored)
            if not (stored.evaluation or metadata.fits(self._settings.packing.seq_len)):
                # The client attached to an earlier plane with another seq_len: cuts differ, so read the frame again.
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
        except Exception as error:  # noqa: BLE001 - no metadata may end the plane
            text = f"group {stored.group!r}: {type(error).__name__}: {error}; its metadata cannot be used"
            return Refused(stored.group, InvalidInput(text), stored.location)
        found = NONE if stored.evaluation else OverLength.of(metadata)
        if not stored.evaluation and self._is_dropped(metadata):
            return Dropped(stored.group, found, stored.location)
        same = not stored.evaluation and metadata.seq_len == self._settings.packing.seq_len
        return Arrived(stored.group, metadata, stored.location, shown, found, stored.metadata if same else b"")

    def _metadata_of(self, stored: Stored) -> GroupMetadata:
        """Return the metadata, if it matches the frame's size and the plane's limits."""
        metadata, size = GroupMetadata.from_bytes(stored.metadata), parse_location(stored.location).size
        name = f"group {stored.group!r}"
        if metadata.group != stored.group or not metadata.num_samples:
            raise CorruptFrame(f"{name}: the metadata is of group {metadata.group!r}, {metadata.num_samples} samples")
        # Check only the sizes here. The rank that reads with the front checks the rest against digests.
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
        """Read the first frame of a segment, to find a wrong mount or a copied folder before anything is
        acknowledged."""
        size, state = parse_location(stored.location).size, xxhash.xxh3_128()
        try:
            # In pieces, so that memory does not grow with the frame. It is not faster.
            for a in range(0, size, _READ_BACK_BYTES):
                state.update(self._storage.read(stored.location, [(a, min(a + _READ_BACK_BYTES, size))])[0])
        except CorruptFrame as error:
            raise Unseen(f"group {stored.group!r}: not in the plane's storage: {error}") from None
        if state.digest() != stored.digest:
            raise Unseen(f"group {stored.group!r}: the plane's storage has other bytes than were written")

    def take(self, batch: Sequence[Incoming]) -> list[Arrived | Dropped | Refused]:
        """Check a batch and write what passes. Returns the result of each group, in order."""
        checked = [self._check(incoming) for incoming in batch]
        good = [one.frame for one, found in zip(batch, checked, strict=True) if isinstance(found, Arrived)]
        try:
            locations = iter(self._writer.write([[frame] for frame in good]) if good else ())
        except StorageError as error:
            return [Refused(found.group, error) if isinstance(found, Arrived) else found for found in checked]
        return [replace(found, location=next(locations)) if isinstance(found, Arrived) else found for found in checked]

    def _check(self, incoming: Incoming) -> Arrived | Dropped | Refused:
        """Check one group. The location is filled in when the batch is written."""
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
        except Exception as error:  # noqa: BLE001 - no frame may end the plane
            text = f"group {group!r}: {type(error).__name__}: {error}; its frame cannot be read"
            return Refused(group, InvalidInput(text))

    def check(self, group: str, frame: Buffer) -> GroupMetadata:
        """Return the metadata of a frame. Raises what is wrong with the frame."""
        drop, seq_len = self._settings.over_length == "drop", self._settings.packing.seq_len
        metadata = check_group(frame, group=group, seq_len=seq_len, limits=self.limits, drop=drop)
        self._check_metadata(metadata)
        return metadata

    def _check_metadata(self, metadata: GroupMetadata) -> None:
        """Raise InvalidInput if the plane's settings exclude a group from training."""
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
                "give the version that sampled it: plane.group(..., policy_version=plane.policy_version)"
            )
        if packing.over_cap == "strict":
            plan(join_metadata([metadata]), packing)  # reject a sample beyond a cap now, not when its step is planned

    def _is_dropped(self, metadata: GroupMetadata) -> bool:
        """Return whether `over_length` drops every sample of a group."""
        return self._settings.over_length == "drop" and not any(metadata.kept)

    def check_evaluation(self, group: str, frame: Buffer) -> tuple[GroupMetadata, EvalMetadata]:
        """Return the metadata of an evaluation group. It need not meet what only training needs: `requires`, a policy
        version, `seq_len`."""
        metadata, eval_metadata = metadata_for_evaluation(group, frame, self.limits)
        self._check_own(metadata)
        return metadata, eval_metadata

    def _check_own(self, metadata: GroupMetadata) -> None:
        for name, description in metadata.own.items():
            column, known = Column.of(name, description), self._settings.packing.own.get(name)
            if known is None:
                raise InvalidInput(
                    f"group {metadata.group!r}: column {name!r} ({words_for(column)}), which this plane does not "
                    f"know; open it with columns=[penstock.Column({name!r}, ...)]"
                )
            if not known.is_like(column):
                raise InvalidInput(
                    f"group {metadata.group!r}: column {name!r} is {words_for(column)}, and this plane declares "
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
    """Return the trained samples that lack a column; in a group that trains nothing, all samples that lack it."""
    trained = np.frombuffer(metadata.kept_loss_tokens, "<i8") > 0
    if not trained.any():
        trained = np.ones(metadata.num_samples, np.bool_)
    has = np.zeros(metadata.num_samples, np.bool_)
    if name in metadata.columns:
        table = np.frombuffer(metadata.has, np.bool_).reshape(metadata.num_samples, -1)
        has = table[:, metadata.columns.index(name)]
    return [metadata.ids[i] for i in np.flatnonzero(trained & ~has).tolist()]


def limits_of(settings: PlaneSettings) -> Limits:
    """Return what one group may decode to, against small frames that expand to gigabytes."""
    tokens = settings.max_group_tokens or max(256 * settings.packing.seq_len, 1 << 20)
    return Limits(max_tokens=tokens, max_bytes=settings.max_group_bytes or 2 << 30, max_samples=1 << 16)


def check_trained(metadata: GroupMetadata) -> None:
    """Reject a group that cannot train anything."""
    why = why_untrained(metadata)
    if why:
        raise InvalidInput(f"group {metadata.group!r}: {why}, {_ACCEPT}")


def why_untrained(metadata: GroupMetadata) -> str:
    """Return why a group cannot train anything and what to do about it, or ""."""
    if metadata.kinds.get("logprobs") == WITHOUT:
        return "its trained tokens have no logprobs; ask the inference server for log-probabilities"
    # Counts are int64 as bytes: all bytes are 0 where all counts are.
    if any(metadata.kept_loss_tokens):
        return ""
    if any(metadata.loss_tokens):
        return f"every trained token lies beyond seq_len {metadata.seq_len}; shorten the prompt, raise seq_len"
    return (
        f"no token of its {metadata.num_samples} samples is trained, loss_mask is False throughout; give the "
        "logprobs= of what the model sampled"
    )


def check_lengths(metadata: GroupMetadata) -> None:
    """Reject a group with a sample longer than the `seq_len` of its metadata."""
    lengths = _numbers(metadata.lengths)
    longer = lengths > metadata.seq_len
    if longer.any():
        i = int(longer.argmax())
        raise InvalidInput(
            f"group {metadata.group!r}: sample {metadata.ids[i]!r} has {lengths[i]} tokens and seq_len is "
            f"{metadata.seq_len} ({int(longer.sum())} of {len(lengths)} samples are longer); generate fewer tokens, "
            "raise seq_len, or open the plane with over_length='truncate' or 'drop'"
        )


def metadata_for(settings: PlaneSettings, metadata: GroupMetadata, frame: Buffer) -> GroupMetadata:
    """Make the metadata of a group again, for the current `seq_len`."""
    drop = settings.over_length == "drop"
    return check_group(frame, group=metadata.group, seq_len=settings.packing.seq_len, drop=drop)
