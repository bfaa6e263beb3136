"""Columns of one number per sample that came after their group was put, kept with the group's metadata.

The frame in storage stays as it was, and so do its digests. A step takes late values from the metadata: they reach a
rank with its picks, and the rank gives them to the samples that it read. Values per token go another way
(`late_merging`).

    frame       samples a b c, without rewards
    metadata    late rewards  1.0  0.0  NaN       c has none: it was scored as an error, and no step takes it
    rank        samples a b, with rewards 1.0 0.0: the same arrays as if they had been put with them
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.arrays import ALL_OR_NONE, COLUMNS, Ragged, Samples

if TYPE_CHECKING:
    from penstock.frames.metadata import GroupMetadata

LateValues: TypeAlias = Mapping[str, NDArray[np.float32]]
"""Column -> [samples] the value of each sample; NaN where it has none, or has one in its frame."""
LATE_COLUMNS = ("rewards", "advantages")
"""Columns of one number per sample that may be attached after a put. Their values are kept with the metadata."""
LATE_IN_FRAME = ("teacher_logprobs", "teacher_topk_logprobs", "rl_weights", "ce_weights", "ref_kl_weights")
"""Columns with values per token that may be attached after a put, as may a run's own columns (`late_merging`). What the
sampler knows, such as `logprobs`, must be there when a group is put. `teacher_topk_ids` come with their
log-probabilities."""
NO_DIGEST, ERROR_DIGEST = b"\0" * 16, b"\xff" * 16
_CUT = ("kept", "kept_loss_tokens", "patches", "stub", "stub_patches")
"""Counts of what a step takes of a sample."""


class LateColumns(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What was attached to a group, and what follows from it."""

    values: dict[str, bytes] = {}
    """Column -> float32 per sample, NaN = none."""
    left_out: bytes = b""
    """bool per sample: whether no step takes it, because it was scored as an error or a filter dropped it. Empty: none
    is left out."""
    digests: dict[str, bytes] = {}
    """Column that was attached in the frame -> 16 bytes per sample: the digest of its values, `NO_DIGEST`, or
    `ERROR_DIGEST` if the sample could not be scored."""

    def __bool__(self) -> bool:
        return bool(self.values or self.left_out or self.digests)

    def arrays(self, rows: Sequence[int] | None = None) -> dict[str, NDArray[np.float32]]:
        """Return the values of all samples, or of some."""
        found = {name: np.frombuffer(data, "<f4") for name, data in self.values.items()}
        return found if rows is None else {name: values[list(rows)] for name, values in found.items()}


NO_LATE = LateColumns()


def with_late(metadata: GroupMetadata, late: LateColumns) -> GroupMetadata:
    """Return metadata as planning needs it once late values are there. `metadata` describes the frame alone."""
    if not late:
        return metadata
    values = late.arrays()
    changes: dict[str, Any] = {"late": late} | _columns(metadata, values)
    if "rewards" in values:
        rewards = np.frombuffer(metadata.rewards, "<f4") if metadata.rewards else np.float32(np.nan)
        changes["rewards"] = np.where(np.isnan(rewards), values["rewards"], rewards).astype("<f4").tobytes()
    changes["kinds"] = metadata.kinds | {
        name: "with" for name, found in values.items() if name in ALL_OR_NONE and not np.isnan(found).all()
    }
    if late.left_out:
        out = np.frombuffer(late.left_out, np.bool_)
        for name in _CUT:
            changes[name] = np.where(out, 0, np.frombuffer(getattr(metadata, name), "<i8")).astype("<i8").tobytes()
        terms = np.frombuffer(metadata.term_tokens, "<i8").reshape(-1, 3)
        changes["term_tokens"] = np.where(out[:, None], 0, terms).astype("<i8").tobytes()
        changes["modality"] = np.where(out, 0, np.frombuffer(metadata.modality, np.uint8)).astype(np.uint8).tobytes()
    return msgspec.structs.replace(metadata, **changes)


def _columns(metadata: GroupMetadata, values: LateValues) -> dict[str, Any]:
    """Return which columns the samples have, in table order, late ones included."""
    count = metadata.num_samples
    table = np.frombuffer(metadata.has, np.bool_).reshape(count, -1)
    has = {name: table[:, k] for k, name in enumerate(metadata.columns)}
    for name, found in values.items():
        has[name] = has.get(name, np.zeros(count, np.bool_)) | ~np.isnan(found)
    order = [name for name in COLUMNS if name in has] + [name for name in has if name not in COLUMNS]
    return {"columns": tuple(order), "has": np.array([has[name] for name in order]).T.tobytes()}


def attach_late(samples: Samples, late: LateValues) -> Samples:
    """Return the samples with their late values.

    >>> import penstock as ps
    >>> samples = Samples.of([ps.Sample(id=name, token_ids=[1, 2]) for name in "ab"])
    >>> [float(sample["rewards"]) for sample in attach_late(samples, {"rewards": np.array([1, 0], np.float32)})]
    [1.0, 0.0]
    """
    if not late:
        return samples
    columns = dict(samples.columns)
    for name, values in late.items():
        known = samples.columns.get(name)
        rows = [
            np.array([value], "<f4") if value == value else _row(known, i) for i, value in enumerate(values.tolist())
        ]
        if known is not None or any(len(row) for row in rows):
            columns[name] = Ragged.of(rows)
    return Samples(
        columns={name: columns[name] for name in samples.table if name in columns},
        text=samples.text,
        policy_versions=samples.policy_versions,
        images=samples.images,
        own=samples.own,
    )


def _row(known: Ragged | None, i: int) -> NDArray[np.float32]:
    return np.zeros(0, "<f4") if known is None else known[i]


def late_digests(digests: Sequence[bytes], late: LateValues) -> list[bytes]:
    """Return the digests of samples with their late values: those of the frame, and the values.

    The plane knows only the digest of a stored sample, so it cannot compute that of the sample with its values."""
    if not late:
        return list(digests)
    out = []
    for i, digest in enumerate(digests):
        values = [(name, late[name][i].tobytes()) for name in sorted(late) if not np.isnan(late[name][i])]
        added = b"".join(name.encode() + b"\0" + data for name, data in values)
        out.append(xxhash.xxh3_128_digest(digest + added) if added else digest)
    return out
