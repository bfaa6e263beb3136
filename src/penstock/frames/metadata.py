"""Metadata of a group: all that the plane knows of it. Computed once, from the samples or from their frame.

Decisions need metadata; only ranks need bytes. Two kilobytes say which samples a group has, their lengths, trained
tokens, columns, shared prefixes and digests, and where their values lie in the frame. A step is planned by joining the
metadata of its groups, without opening a frame. Metadata is sent and logged deflated.

An evaluation group is never trained. `EvalMetadata` has what metrics show of it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.arrays import (
    ALL_OR_NONE,
    WEIGHTS,
    Description,
    Own,
    RolloutInfo,
    SampleMetadata,
    Samples,
    Shape,
    SharedPrefixes,
    own_of,
    read_rollout,
    sample_digests,
    table_with,
)
from penstock.errors import CorruptFile, CorruptFrame, InvalidInput
from penstock.frames.head import Limits, front_of
from penstock.frames.late_columns import NO_LATE, LateColumns
from penstock.frames.layout import Buffer
from penstock.frames.node_prefixes import node_prefixes
from penstock.frames.prefixes import Prefixes
from penstock.frames.reading import describe
from penstock.frames.token_versions import Counts, Terms, count_versions, versions_problem
from penstock.frames.writing import FramePieces

FORMAT = 4
_MAX_BYTES = 1 << 26
"""Bound on metadata as msgpack. For 65,536 samples, the most that a plane accepts in a group, it takes about 15 MB."""
WITH, WITHOUT = "with", "without"
_ARRAYS = ("lengths", "kept", "loss_tokens", "kept_loss_tokens", "patches", "stub", "stub_patches")
"""Numbers per sample, as int64."""
_arrays_of = attrgetter(*_ARRAYS)
_I8 = np.dtype("<i8")
MAX_METRICS, MAX_METRIC_NAME = 32, 64


class GroupMetadata(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One group. Arrays are little-endian bytes with one entry per sample, so those of many groups join by joining
    bytes.
    """

    format: int = FORMAT
    group: str
    prompt: str
    run: str
    seq_len: int
    """What samples are cut to. `kept` and all that depends on it were computed for this."""
    num_tokens: int
    policy_version: int | None
    """Of its oldest sample; None if no sample has one."""
    kinds: dict[str, str]
    """What all groups of a step must have in common, by column: whether its trained samples have the column, or in
    which dtype and shape. Absent where the group does not care.
    """
    columns: tuple[str, ...]
    """Present in any sample."""
    ids: tuple[str, ...]
    modes: tuple[str, ...]
    """One per sample, or one for all."""
    lengths: bytes
    kept: bytes
    loss_tokens: bytes
    kept_loss_tokens: bytes
    patches: bytes
    stub: bytes
    stub_patches: bytes
    term_tokens: bytes
    """int64 [n, 3]."""
    modality: bytes
    """uint8."""
    has: bytes
    """bool [n, columns]."""
    parents: tuple[int, ...]
    """Per sample the earlier one whose first tokens it repeats, or -1; empty when nothing is shared."""
    shared: tuple[int, ...]
    """Per sample how many first tokens agree with it in every input of the model: ids, columns per node, images."""
    versions: Counts
    """Per sample (policy version, kept trained tokens it sampled), -1 for an unknown version. Empty where all samples
    have the group's version throughout.
    """
    digests: tuple[bytes, ...]
    """Per sample 16 bytes, computed by `penstock.arrays.digests`."""
    shapes: dict[str, Shape] = {}
    """dtype and trailing dimensions of the columns that have some."""
    own: dict[str, Description] = {}
    """Declarations in the frame of columns that are not in the table."""
    shared_patches: tuple[int, ...] = ()
    """Per sample how many image patches are in these first tokens."""
    parted: tuple[int, ...] = ()
    """Per sample how many tokens after them have equal ids but differ in another input of the model."""
    front: bytes = b""
    """The frame's front, which says where each sample's values lie."""
    size: int = 0
    """Bytes of the frame."""
    env: tuple[str, ...] = ("",)
    """One per sample, or one for all."""
    rewards: bytes = b""
    """float32 per sample: its one number, or the sum over its tokens; NaN = none. Empty where no sample has any."""
    truncated: bytes = b""
    """bool per sample: whether its rollout ended by a limit. Empty where none did."""
    seconds: tuple[float, ...] = ()
    """Per sample how long its rollout took, -1 = not known. Empty where none is known."""
    metrics: dict[str, float] = {}
    """The mean of each of the rollouts' metrics over the samples: at most 32, with names of at most 64 characters."""
    late: LateColumns = NO_LATE
    """Values that were attached after the put. The plane sets it; `columns`, `has`, `rewards` and counts include it."""
    version_terms: Terms = ()
    """Like `versions`: how many of these tokens have a weight in the rl, ce and ref_kl terms. Empty where the samples'
    modes say so.
    """
    errored: bytes = b""
    """bool per sample: whether its rollout failed. Empty where none did."""

    @property
    def num_samples(self) -> int:
        return len(self.ids)

    @property
    def longest(self) -> int:
        return int(np.frombuffer(self.lengths, "<i8").max())

    def fits(self, seq_len: int) -> bool:
        """Return whether this metadata also holds for another `seq_len`: neither length cuts a sample."""
        return seq_len == self.seq_len or self.longest <= min(seq_len, self.seq_len)

    def to_bytes(self) -> bytes:
        return zlib.compress(msgspec.msgpack.encode(self), 1)

    @staticmethod
    def from_bytes(data: bytes) -> GroupMetadata:
        try:
            found = _READ.decode(_inflated(data))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CorruptFrame(f"metadata of a group: {error}") from None
        if found.format != FORMAT:
            raise CorruptFrame(f"metadata of a group: format {found.format}; this version reads {FORMAT}")
        _check_sizes(found)
        return found


# Made at import: msgspec crashes when two threads are the first to decode a type.
_READ = msgspec.msgpack.Decoder(GroupMetadata)


def _inflated(data: bytes) -> bytes:
    reader = zlib.decompressobj()
    try:
        found = reader.decompress(data, _MAX_BYTES)
    except (zlib.error, TypeError) as error:
        raise CorruptFrame(f"metadata of a group: {error}") from None
    if not reader.eof or reader.unused_data:
        raise CorruptFrame(f"metadata of a group: cut off, or more than {_MAX_BYTES:,} bytes, or with more behind them")
    return found


def _check_sizes(found: GroupMetadata) -> None:
    """Raise unless per-sample fields have one entry per sample, counts are possible, and metrics are few."""
    count = len(found.ids)
    sizes = [*map(len, _arrays_of(found))]
    if sizes.count(8 * count) < len(sizes):
        name, size = next(one for one in zip(_ARRAYS, sizes, strict=True) if one[1] != 8 * count)
        raise CorruptFrame(f"metadata of a group: {size} bytes of {name}; {count} samples take {8 * count}")
    if found.rewards or found.truncated or found.errored or found.seconds or found.late != NO_LATE:
        _check_values(found, count)
    if (found.versions or found.version_terms) and (
        problem := versions_problem(found.versions, found.version_terms, np.frombuffer(found.loss_tokens, "<i8"))
    ):
        raise CorruptFrame(f"metadata of a group: {problem}")
    if found.metrics and (len(found.metrics) > MAX_METRICS or max(map(len, found.metrics)) > MAX_METRIC_NAME):
        raise CorruptFrame(
            f"metadata of a group: {len(found.metrics)} metrics; at most {MAX_METRICS}, with names of at most "
            f"{MAX_METRIC_NAME} characters"
        )


def _check_values(found: GroupMetadata, count: int) -> None:
    """Raise unless what not every group has is given for none or for each of its samples."""
    sizes = {name: float(len(getattr(found, name))) for name in ("truncated", "errored", "seconds")}
    sizes["rewards"] = len(found.rewards) / 4
    if found.late != NO_LATE:
        sizes |= {f"late {name}": len(data) / 4 for name, data in found.late.values.items()}
        sizes |= {f"digests of late {name}": len(data) / 16 for name, data in found.late.digests.items()}
        sizes["samples left out"] = len(found.late.left_out)
    for name, entries in sizes.items():
        if entries not in (0, count):
            raise CorruptFrame(f"metadata of a group: {name} of {entries:g} samples; it has {count}")


def check_group(
    frame: Buffer,
    *,
    group: str,
    seq_len: int,
    limits: Limits | None = None,
    drop: bool = False,
    is_partial: bool = False,
) -> GroupMetadata:
    """Check a complete frame that arrived and compute its metadata. Raises InvalidInput or CorruptFrame.

    With `drop`, samples longer than `seq_len` keep nothing, so no step takes them; otherwise they are truncated. With
    `is_partial`, some samples may still lack a column that others have: it is being attached.
    """
    head, samples, _ = describe(frame, limits=limits or Limits())
    front, size = front_of(frame), memoryview(frame).nbytes
    return metadata_of(
        samples,
        head.prefixes,
        group=group,
        seq_len=seq_len,
        front=front,
        size=size,
        drop=drop,
        is_partial=is_partial,
    )


def metadata_of_pieces(
    made: FramePieces, *, group: str, seq_len: int, drop: bool = False, is_partial: bool = False
) -> GroupMetadata:
    """Compute the metadata of a frame encoded here, without decoding it. Equals `check_group` of the frame."""
    return metadata_of(
        made.samples,
        made.prefixes,
        group=group,
        seq_len=seq_len,
        front=made.front,
        size=made.size,
        drop=drop,
        is_partial=is_partial,
    )


def metadata_of(
    samples: Samples,
    prefixes: Prefixes | None,
    *,
    group: str,
    seq_len: int,
    front: bytes = b"",
    size: int = 0,
    drop: bool = False,
    is_partial: bool = False,
) -> GroupMetadata:
    """Compute the metadata of valid samples. Raises InvalidInput where they are not one group.

    `prefixes` says what the samples' ids share; `front` and `size` belong to the frame that holds them.
    """
    _check_names(group, samples)
    table = SampleMetadata.of(samples, seq_len, drop=drop)
    if not drop and np.count_nonzero(table.kept) < len(table):
        name = samples.ids[int(table.kept.argmin())]
        raise InvalidInput(
            f"group {group!r}: sample {name!r} begins with an image that does not fit seq_len {seq_len}; "
            "raise seq_len or use smaller images"
        )
    columns = tuple(table.has)
    found = node_prefixes(samples, prefixes if prefixes is not None and prefixes.any else None)
    shares = bool(np.count_nonzero(found.lengths) or np.count_nonzero(found.parted))
    versions: list[int] = samples.policy_versions.tolist()
    return GroupMetadata(
        group=group,
        prompt=samples.text.get("prompt", ("",))[0],
        run=samples.text["run"][0],
        seq_len=seq_len,
        num_tokens=samples.num_tokens,
        policy_version=min((version for version in versions if version >= 0), default=None),
        kinds=_kinds(group, table, is_partial=is_partial),
        shapes=table.shapes,
        own={name: column.described() for name, column in table.own.items()},
        columns=columns,
        ids=samples.ids,
        modes=_one_for_all(table.mode),
        **{name: getattr(table, name).astype(_I8, copy=False).tobytes() for name in _ARRAYS},
        term_tokens=table.term_tokens.astype(_I8, copy=False).tobytes(),
        modality=table.modality.tobytes(),
        has=np.array([table.has[name] for name in columns]).T.tobytes(),
        parents=tuple(found.parents.tolist()) if shares else (),
        shared=tuple(found.lengths.tolist()) if shares else (),
        shared_patches=tuple(found.patches.tolist()) if shares else (),
        parted=tuple(found.parted.tolist()) if shares else (),
        **count_versions(samples, table.kept),
        digests=tuple(sample_digests(samples)),
        front=front,
        size=size,
        env=_one_for_all(samples.text["env"]),
        rewards=_rewards(samples),
        **_rollouts(samples.text["rollout"]),
    )


def _rollouts(texts: tuple[str, ...]) -> dict[str, Any]:
    """Return truncation, errors, seconds and metrics of the samples' rollouts; nothing where no sample has any."""
    if not any(texts):
        return {}
    known = [read_rollout(text) for text in texts]
    out: dict[str, Any] = {"metrics": _mean_metrics(known)}
    if any(one.truncated for one in known):
        out["truncated"] = np.array([one.truncated for one in known]).tobytes()
    if any(one.error for one in known):
        out["errored"] = np.array([bool(one.error) for one in known]).tobytes()
    if any(one.seconds is not None for one in known):
        out["seconds"] = tuple(-1.0 if one.seconds is None else one.seconds for one in known)
    return out


def _mean_metrics(known: list[RolloutInfo]) -> dict[str, float]:
    """Return the mean of each metric over the samples that have it, for the first names only: metadata must
    stay small.
    """
    values: dict[str, list[float]] = {}
    for one in known:
        for name, value in one.metrics.items():
            if value is not None and len(name) <= MAX_METRIC_NAME:
                values.setdefault(name, []).append(value)
    means = {name: sum(values[name]) / len(values[name]) for name in sorted(values)[:MAX_METRICS]}
    return {name: mean for name, mean in means.items() if math.isfinite(mean)}


def _one_for_all(names: tuple[str, ...]) -> tuple[str, ...]:
    return names if len(set(names)) > 1 else names[:1]


def _rewards(samples: Samples) -> bytes:
    """Return one float32 per sample; nothing where no sample has a reward."""
    column = samples.columns.get("rewards")
    if column is None or not len(column.values):
        return b""
    out = np.full(len(samples), np.nan, "<f4")
    lengths = column.lengths
    once = lengths == 1
    out[once] = column.values[column.offsets[:-1][once]]
    for i in np.flatnonzero(lengths > 1).tolist():
        row = column[i][~np.isnan(column[i])]
        if len(row):
            # The same number on every token means one reward for the sample. Different rewards per token add up.
            with np.errstate(over="ignore"):
                out[i] = row[0] if (row == row[0]).all() else row.sum(dtype=np.float64)
    return out.tobytes()


def join_metadata(groups: Sequence[GroupMetadata]) -> SampleMetadata:
    """Return what planning needs to know of all samples of these groups, in order."""

    def joined(name: str, dtype: str = "<i8") -> Any:
        return np.frombuffer(b"".join(getattr(metadata, name) for metadata in groups), dtype)

    counts = [metadata.num_samples for metadata in groups]
    modes = (
        metadata.modes if len(metadata.modes) > 1 else metadata.modes * metadata.num_samples for metadata in groups
    )
    return SampleMetadata(
        **{name: joined(name) for name in _ARRAYS},
        term_tokens=joined("term_tokens").reshape(-1, 3),
        modality=np.frombuffer(b"".join(metadata.modality for metadata in groups), np.uint8),
        has=_joined_has(groups),
        shapes={name: shape for metadata in groups for name, shape in metadata.shapes.items()},
        own=_own(groups),
        ids=tuple(chain.from_iterable(metadata.ids for metadata in groups)),
        group=tuple(chain.from_iterable([metadata.group] * n for metadata, n in zip(groups, counts, strict=True))),
        run=tuple(chain.from_iterable([metadata.run] * n for metadata, n in zip(groups, counts, strict=True))),
        mode=tuple(chain.from_iterable(modes)),
        shared=SharedPrefixes.joined([_shared(metadata) for metadata in groups]),
    )


def _own(groups: Sequence[GroupMetadata]) -> Own:
    """Return the columns that are not in the table. Groups that declare one differently never share a step."""
    return own_of({name: described for metadata in groups for name, described in metadata.own.items()})


def _joined_has(groups: Sequence[GroupMetadata]) -> dict[str, NDArray[np.bool_]]:
    layouts = {metadata.columns for metadata in groups}
    names = [name for name in table_with(_own(groups)) if any(name in layout for layout in layouts)]
    if len(layouts) == 1:
        table = np.frombuffer(b"".join(metadata.has for metadata in groups), np.bool_).reshape(-1, len(names))
        return {name: table[:, k] for k, name in enumerate(names)}
    parts = []
    for metadata in groups:
        own = np.frombuffer(metadata.has, np.bool_).reshape(metadata.num_samples, -1)
        part = np.zeros((metadata.num_samples, len(names)), np.bool_)
        # Groups may have different columns: group columns (a, c) go to places 0 and 2 of names (a, b, c).
        part[:, [names.index(name) for name in metadata.columns]] = own
        parts.append(part)
    table = np.concatenate(parts)
    return {name: table[:, k] for k, name in enumerate(names)}


def _check_names(group: str, samples: Samples) -> None:
    if not group:
        raise InvalidInput("group '': no id; give each group its own")
    if not len(samples):
        raise InvalidInput(f"group {group!r}: no samples; a group has at least one")
    foreign = next((name for name in samples.text["group"] if name != group), group)
    if foreign != group:
        raise InvalidInput(f"group {group!r}: holds a sample of group {foreign!r}; put groups one by one")
    for what in ("run", "prompt"):
        names = sorted(set(samples.text.get(what, ())))
        if len(names) > 1:
            raise InvalidInput(
                f"group {group!r}: samples of {what}s {names[0]!r} and {names[1]!r}; a group belongs to one {what}"
            )
    if len(set(samples.ids)) != len(samples):
        raise InvalidInput(f"group {group!r}: two samples have the same id; ids must be unique")


def _kinds(group: str, table: SampleMetadata, *, is_partial: bool) -> dict[str, str]:
    """Return what this group demands of the others in its step. Raises InvalidInput for a group that is itself mixed.

    A group that has a column demands that every sample that needs it has it, even if the group could do without.
    """
    found: dict[str, str] = {}
    present, weighted = set(table.mode), not table.has.keys().isdisjoint(WEIGHTS)
    for name, modes in ALL_OR_NONE.items():
        if name not in table.has and present.isdisjoint(modes) and not weighted:
            continue
        have = int(np.count_nonzero(table.has[name])) if name in table.has else 0
        if have == len(table):
            found[name] = WITH
            continue
        lacking = table.lacking(name)
        lack = np.count_nonzero(lacking)  # a fifth of the time of `any`
        if have and lack and not is_partial:
            raise InvalidInput(
                f"group {group!r}: sample {table.ids[int(lacking.argmax())]!r} has no {name}, which {have} other "
                f"samples have; record them for all trained samples of mode {' or '.join(modes)}, with weights of "
                "these modes, or for none"
            )
        if have or lack:
            found[name] = WITH if have else WITHOUT
    found |= {name: repr(column.described()) for name, column in table.own.items()}
    return found | {name: f"{dtype}{list(sizes)}" for name, (dtype, sizes) in table.shapes.items()}


def _shared(metadata: GroupMetadata) -> SharedPrefixes:
    if not metadata.parents:
        return SharedPrefixes.none(metadata.num_samples)
    names = {"parents": "parents", "lengths": "shared", "patches": "shared_patches", "parted": "parted"}
    return SharedPrefixes(**{name: np.array(getattr(metadata, own), np.int64) for name, own in names.items()})


UNCUT = 2**40
"""A `seq_len` that cuts nothing: no sample is this long."""


class EvalMetadata(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What metrics show of one evaluation group. Stored in place of the metadata that planning needs of other
    groups.
    """

    env: str = ""
    rewards: float = 0.0
    """Sum over samples that have a reward."""
    num_rewards: int = 0
    sampled: int = 0
    """Tokens sampled by the model."""

    @staticmethod
    def of(samples: Samples) -> EvalMetadata:
        column = samples.columns.get("rewards")
        rows = [] if column is None else [column[i] for i in range(len(samples)) if len(column[i])]
        # The same number on every token is one reward for the sample; different ones are summed.
        rewards = [float(row[0]) if (row == row[0]).all() else float(row.sum(dtype=np.float64)) for row in rows]
        return EvalMetadata(
            env=samples.text["env"][0],
            rewards=sum(rewards),
            num_rewards=len(rewards),
            sampled=int(samples.loss_tokens.sum()),
        )

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def from_bytes(data: bytes) -> EvalMetadata:
        try:
            return _READ_EVALUATION.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CorruptFile(f"metadata of an evaluation group: {error}; restore the folder from a copy") from None


_READ_EVALUATION = msgspec.msgpack.Decoder(EvalMetadata)


def metadata_for_evaluation(group: str, frame: Buffer, limits: Limits) -> tuple[GroupMetadata, EvalMetadata]:
    """Compute both kinds of metadata of a group that is not trained. Its samples are not cut."""
    metadata = check_group(frame, group=group, seq_len=UNCUT, limits=limits)
    _, samples, _ = describe(frame, limits=limits)
    return metadata, EvalMetadata.of(samples)
