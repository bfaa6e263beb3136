"""Check groups against the plane's settings, and store the frames of clients that do not write to storage themselves.

A frame is read once, to check it and to make its metadata. That work grows with the frame, so it runs on the intake
thread. Metadata that a client made itself is about a kilobyte and is checked on the loop's thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.arrays import MAX_GROUP_SAMPLES, Column, words_for
from penstock.convert import advantage_named, filter_named
from penstock.errors import CorruptFrame, InvalidInput, PenstockError, StorageError
from penstock.frames import (
    NO_LATE,
    WITHOUT,
    Buffer,
    EvalMetadata,
    GroupMetadata,
    Limits,
    check_group,
    front_and_frame_size,
    is_late,
    join_metadata,
    metadata_for_evaluation,
    read_head,
    with_late,
)
from penstock.log import MAX_SHOWN, Awaited, Summary
from penstock.packing import plan
from penstock.plane.settings import PlaneSettings
from penstock.protocol import over_length_text
from penstock.storage import Storage, Writer, parse_location

_READ_BACK_BYTES = 1 << 20
_MAY_WAIT = "set `needs_deadline_s` and attach it after the put, "
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
        if metadata.kept == metadata.lengths:  # the usual case
            return NONE
        lengths, kept = np.frombuffer(metadata.lengths, "<i8"), np.frombuffer(metadata.kept, "<i8")
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
        return over_length_text(asdict(self))


NONE = OverLength()


def int64s(data: bytes) -> memoryview:
    """Return the numbers of a group's samples, without an array: a group has few."""
    return memoryview(data).cast("q")


@dataclass(slots=True, kw_only=True, eq=False)
class Incoming:
    """A group between its put and its table: one record, filled in on the way.

        offered     id, digest, size, tickets, table; and the frame, or its location and the client's metadata
        checked     metadata and over_length; or `error`; or `is_dropped`
        stored      location
        ready       `flush` may accept it

    The loop owns the record, and a worker thread fills in what it checks and stores. Only the loop sets `is_ready`,
    when the worker's result comes back. So a turn never accepts a record that a worker is still filling in."""

    id: str
    digest: bytes
    """xxh3-128 of the frame, as the client sent it."""
    size: int
    """Bytes of the frame."""
    tickets: list[object] = field(default_factory=list)
    """The puts to answer: the first one, then repeated ones."""
    frame: Buffer = b""
    """Empty if the client wrote the frame to storage."""
    location: str = ""
    """Where the frame is stored."""
    raw_metadata: bytes = b""
    """Metadata that the client made. Cleared by the check if the log cannot store the same bytes."""
    raw_eval_metadata: bytes = b""
    """`EvalMetadata` that the client made."""
    is_evaluation: bool = False
    """Put for evaluation: never trained, and in no table."""
    priority: float = 1.0
    advantage: str = ""
    """The advantage to compute when late rewards arrive, by name."""
    filters: tuple[str, ...] = ()
    awaited: Awaited | None = None
    """The columns that it lacks and waits for."""
    table: str = ""
    """The table it will wait in; not used for an evaluation group."""
    read_back: bool = False
    """The plane must read the frame before it counts: it is the first of its segment."""
    metadata: GroupMetadata | None = None
    eval_metadata: EvalMetadata | None = None
    """What metrics show of an evaluation group."""
    over_length: OverLength = NONE
    """Its truncated and dropped samples."""
    is_dropped: bool = False
    """Every sample is longer than `seq_len`, and `over_length` is "drop"."""
    is_partial: bool = False
    """Whether only some of its samples may have a late column."""
    error: PenstockError | None = None
    """Why it is rejected."""
    is_ready: bool = False


class Unseen(StorageError):
    """The plane does not find a frame that a client wrote: the client sees another storage."""


class Intake:
    """Checks groups, and writes frames that pass with one sync per batch."""

    def __init__(self, settings: PlaneSettings, writer: Writer) -> None:
        self._settings, self._writer = settings, writer
        self._storage = cast(Storage, writer.storage)  # the plane reads what it writes
        self.limits = limits_of(settings)
        self._late = settings.late_columns

    def names_of(self, frame: Buffer) -> tuple[str, str]:
        """Return the tenant and the environment that a frame names, without reading its body."""
        text = read_head(frame, limits=self.limits).text
        return next(iter(text["run"]), ""), next(iter(text["env"]), "")

    def look_at(self, group: Incoming, *, may_read: bool = True) -> bool:
        """Check a group that a client wrote to storage. Returns False if the frame must be read for that and `may_read`
        is False."""
        try:
            metadata = self._metadata_of(group)
            if not (group.is_evaluation or metadata.fits(self._settings.packing.seq_len)):
                # The client attached to an earlier plane with another seq_len: cuts differ, so read the frame again.
                if not may_read:
                    return False
                frame = self._storage.read(group.location)[0]
                metadata = metadata_for(self._settings, metadata, frame, is_partial=group.is_partial)
            if group.is_evaluation:
                group.eval_metadata = EvalMetadata.from_bytes(group.raw_eval_metadata)
                self._check_own(metadata)
            else:
                self._check_metadata(metadata)
            if group.read_back:
                self._read_back(group)
            self._checked(group, metadata)
        except PenstockError as error:
            group.error = error
        except Exception as error:  # noqa: BLE001 - no metadata may end the plane
            text = f"group {group.id!r}: {type(error).__name__}: {error}; its metadata cannot be used"
            group.error = InvalidInput(text)
        # The log can store the client's bytes only if they are the metadata that this plane would make.
        if group.is_evaluation or group.metadata is None or group.metadata.seq_len != self._settings.packing.seq_len:
            group.raw_metadata = b""
        return True

    def look_at_all(self, groups: Sequence[Incoming]) -> None:
        """Check groups that clients wrote to storage. Of frames in one segment, the first that is good is read."""
        verified: set[str] = set()
        for group in groups:
            segment = parse_location(group.location).segment
            group.read_back = group.read_back and segment not in verified
            self.look_at(group)
            if group.error is None:
                verified.add(segment)

    def _checked(self, group: Incoming, metadata: GroupMetadata) -> None:
        """Fill in the metadata of a group that passed, and what follows from it."""
        group.metadata = metadata
        if not group.is_evaluation:
            if metadata.kept != metadata.lengths:
                group.over_length = OverLength.of(metadata)
            group.is_dropped = is_dropped(self._settings, metadata)
            if self._late or group.advantage:
                group.awaited = self._awaited(group, metadata)

    def _metadata_of(self, group: Incoming) -> GroupMetadata:
        """Return the metadata, if it matches the frame's size and the plane's limits."""
        metadata = GroupMetadata.from_bytes(group.raw_metadata)
        if metadata.late != NO_LATE:
            raise CorruptFrame(f"group {group.id!r}: metadata with late values; attach them after the put")
        if metadata.group != group.id or not metadata.ids:
            raise CorruptFrame(
                f"group {group.id!r}: the metadata is of group {metadata.group!r}, {metadata.num_samples} samples"
            )
        # Check only the sizes here. The rank that reads with the front checks the rest against digests.
        front, frame = front_and_frame_size(metadata.front)
        if not metadata.size == frame == group.size or front != len(metadata.front):
            raise CorruptFrame(
                f"group {group.id!r}: metadata of a frame of {metadata.size} bytes, front of {len(metadata.front)}, at "
                f"a location of {group.size}; they must agree"
            )
        if metadata.num_tokens > self.limits.max_tokens or len(metadata.ids) > self.limits.max_samples:
            raise InvalidInput(
                f"group {group.id!r}: {metadata.num_tokens:,} tokens in {metadata.num_samples:,} samples; at most "
                f"{self.limits.max_tokens:,} (max_group_tokens) in {self.limits.max_samples:,}"
            )
        return metadata

    def _read_back(self, group: Incoming) -> None:
        """Read the first frame of a segment, to find a wrong mount or a copied folder before anything is
        acknowledged."""
        size, state = parse_location(group.location).size, xxhash.xxh3_128()
        try:
            # In pieces to bound the memory; it is not faster.
            for a in range(0, size, _READ_BACK_BYTES):
                state.update(self._storage.read(group.location, [(a, min(a + _READ_BACK_BYTES, size))])[0])
        except CorruptFrame as error:
            raise Unseen(f"group {group.id!r}: not in the plane's storage: {error}") from None
        if state.digest() != group.digest:
            raise Unseen(f"group {group.id!r}: the plane's storage has other bytes than were written")

    def take(self, batch: Sequence[Incoming]) -> None:
        """Check a batch and write the frames that pass, with one sync."""
        for group in batch:
            self._check(group)
        good = [group for group in batch if group.error is None and not group.is_dropped]
        try:
            locations = self._writer.write([[group.frame] for group in good]) if good else []
        except StorageError as error:
            for group in good:
                group.error = error
            return
        for group, location in zip(good, locations, strict=True):
            group.location = location

    def _check(self, group: Incoming) -> None:
        """Check one group that came with its frame."""
        try:
            if group.is_evaluation:
                metadata, group.eval_metadata = self.check_evaluation(group.id, group.frame)
            else:
                metadata = self._check_partial(group) if group.is_partial else self.check(group.id, group.frame)
            self._checked(group, metadata)
        except PenstockError as error:
            group.error = error
        except Exception as error:  # noqa: BLE001 - no frame may end the plane
            text = f"group {group.id!r}: {type(error).__name__}: {error}; its frame cannot be read"
            group.error = InvalidInput(text)

    def check(self, group: str, frame: Buffer) -> GroupMetadata:
        """Return the metadata of a frame. Raises what is wrong with the frame."""
        drop, seq_len = self._settings.over_length == "drop", self._settings.packing.seq_len
        metadata = check_group(frame, group=group, seq_len=seq_len, limits=self.limits, drop=drop)
        self._check_metadata(metadata)
        return metadata

    def _check_partial(self, group: Incoming) -> GroupMetadata:
        """`check` for a group in which only some samples have a late column."""
        drop, seq_len = self._settings.over_length == "drop", self._settings.packing.seq_len
        metadata = check_group(
            group.frame, group=group.id, seq_len=seq_len, limits=self.limits, drop=drop, is_partial=True
        )
        self._check_metadata(metadata)
        return metadata

    def _check_metadata(self, metadata: GroupMetadata) -> None:
        """Raise InvalidInput if the plane's settings exclude a group from training."""
        packing = self._settings.packing
        if self._settings.over_length == "reject":
            check_lengths(metadata)
        if metadata.own:
            self._check_own(metadata)
        if self._settings.needs:
            self._check_required(metadata)
        if self._settings.untrained_groups == "reject" and not is_dropped(self._settings, metadata):
            check_trained(metadata)
        most = self._settings.replay.max_staleness
        if metadata.policy_version is None and most is not None:
            raise InvalidInput(
                f"group {metadata.group!r}: no policy_version, and max_staleness is {most}; "
                "give the version that sampled it: plane.group(..., policy_version=plane.policy_version)"
            )
        if packing.over_cap == "strict":
            plan(join_metadata([metadata]), packing)  # reject a sample beyond a cap now, not when its step is planned

    def check_evaluation(self, group: str, frame: Buffer) -> tuple[GroupMetadata, EvalMetadata]:
        """Return the metadata of an evaluation group. It need not meet what only training needs: `needs`, a policy
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
        for name in self._settings.needs:
            lacking = [] if name in self._late else _lacking(metadata, name)
            if lacking:
                raise InvalidInput(
                    f"group {metadata.group!r}: no {name} in sample {metadata.ids[lacking[0]]!r} ({len(lacking)} of "
                    f"{metadata.num_samples} samples), which this plane needs of each trained sample; record it, "
                    f"{_MAY_WAIT if is_late(name, self._settings.packing.own) else ''}or open the plane without it in "
                    "`needs`"
                )

    def _awaited(self, group: Incoming, metadata: GroupMetadata) -> Awaited | None:
        """Return what a group waits for. Raises InvalidInput for names that could not be applied."""
        lacking = {name: _lacking(metadata, name) for name in self._late}
        if group.advantage and "rewards" in lacking:
            lacking["rewards"] = _unscored(metadata)
        found = {name: tuple(rows) for name, rows in lacking.items() if rows}
        if group.advantage and "rewards" not in found:
            raise InvalidInput(
                f"group {group.id!r}: advantage {group.advantage!r:.60} is to be computed from late rewards, and this "
                "plane does not wait for them; open it with needs=('rewards',) and needs_deadline_s, or give rewards"
            )
        if not found:
            return None
        if group.advantage:
            advantage_named(group.advantage)
        for name in group.filters:
            filter_named(name)
        return Awaited(columns=found, advantage=group.advantage, filters=group.filters)


def is_dropped(settings: PlaneSettings, metadata: GroupMetadata) -> bool:
    """Return whether `over_length` drops every sample of a group."""
    return settings.over_length == "drop" and not any(metadata.kept)


def summary_of(metadata: GroupMetadata) -> Summary:
    """Return what events show of a group."""
    return Summary(
        env=metadata.env[0],
        tenant=metadata.run,
        rewards=metadata.rewards[: 4 * MAX_SHOWN],
        # int64 to uint32, little-endian: every second half.
        lengths=memoryview(metadata.lengths[: 8 * MAX_SHOWN]).cast("I")[::2].tobytes(),
    )


def _lacking(metadata: GroupMetadata, name: str) -> list[int]:
    """Return the trained samples that lack a column. If a group trains nothing, all its samples are looked at."""
    trained = np.frombuffer(metadata.kept_loss_tokens, "<i8") > 0
    if not trained.any():
        trained = np.ones(metadata.num_samples, np.bool_)
    rows: list[int] = np.flatnonzero(trained & ~_having(metadata, name)).tolist()
    return rows


def _unscored(metadata: GroupMetadata) -> list[int]:
    """Return the samples without a reward whose rollouts did not fail. A baseline covers them all, also those that
    `seq_len` leaves nothing to train of."""
    failed = np.frombuffer(metadata.errored, np.bool_) if metadata.errored else np.False_
    rows: list[int] = np.flatnonzero(~_having(metadata, "rewards") & ~failed).tolist()
    return rows


def _having(metadata: GroupMetadata, name: str) -> NDArray[np.bool_]:
    """Return [samples], True where a sample has a column."""
    if name not in metadata.columns:
        return np.zeros(metadata.num_samples, np.bool_)
    table = np.frombuffer(metadata.has, np.bool_).reshape(metadata.num_samples, -1)
    return table[:, metadata.columns.index(name)]


def limits_of(settings: PlaneSettings) -> Limits:
    """Return what one group may decode to, against small frames that expand to gigabytes."""
    tokens = settings.max_group_tokens or max(256 * settings.packing.seq_len, 1 << 20)
    return Limits(max_tokens=tokens, max_bytes=settings.max_group_bytes or 2 << 30, max_samples=MAX_GROUP_SAMPLES)


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
    lengths = int64s(metadata.lengths)
    if max(lengths, default=0) <= metadata.seq_len:
        return
    longer = [i for i, length in enumerate(lengths) if length > metadata.seq_len]
    i = longer[0]
    raise InvalidInput(
        f"group {metadata.group!r}: sample {metadata.ids[i]!r} has {lengths[i]} tokens and seq_len is "
        f"{metadata.seq_len} ({len(longer)} of {len(lengths)} samples are longer); generate fewer tokens, "
        "raise seq_len, or open the plane with over_length='truncate' or 'drop'"
    )


def metadata_for(
    settings: PlaneSettings,
    metadata: GroupMetadata,
    frame: Buffer,
    *,
    seq_len: int | None = None,
    is_partial: bool = False,
) -> GroupMetadata:
    """Make the metadata of a group again, for another `seq_len`; None: the current one."""
    drop = settings.over_length == "drop"
    found = check_group(
        frame,
        group=metadata.group,
        seq_len=seq_len or settings.packing.seq_len,
        drop=drop,
        is_partial=is_partial or bool(metadata.late.digests),
    )
    return with_late(found, metadata.late)
