"""Samples longer than `seq_len`: how many were truncated or dropped, with their tokens.

A plane is told in `over_length` what to do with them. Reject: the put fails and nothing is counted. Truncate: the
sample keeps its first tokens. Drop: no step takes the sample; its group is trained without it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass

import numpy as np

from penstock.errors import InvalidInput, PenstockError
from penstock.frames import Buffer, GroupMetadata, check_group
from penstock.log import Shorten
from penstock.plane.recorder import Recorder
from penstock.plane.settings import PlaneSettings
from penstock.storage import Storage

logger = logging.getLogger("penstock.plane")


@dataclass(frozen=True, slots=True)
class OverLength:
    """What was cut off samples, and what was left out whole."""

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
        """Count what a group loses to the `seq_len` that its metadata were made for."""
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
        """What was lost beyond an earlier count of the same samples."""
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


def check_lengths(metadata: GroupMetadata) -> None:
    """Reject a group with a sample longer than the `seq_len` its metadata were made for."""
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
    """Make the metadata of a group again, for the `seq_len` of today."""
    drop = settings.over_length == "drop"
    return check_group(frame, group=metadata.group, seq_len=settings.packing.seq_len, drop=drop)


def note_seq_len(settings: PlaneSettings, recorder: Recorder, storage: Storage) -> None:
    """Count and log what a smaller `seq_len` than before cuts off the groups that wait for training.

    They were accepted at the larger one, so they are truncated (dropped if `over_length` says so), never rejected."""
    log, seq_len = recorder.log, settings.packing.seq_len
    before = log.meta("seq_len", seq_len)
    found = OverLength.total(_further_cuts(settings, recorder, storage)) if seq_len < before else NONE
    op = recorder.state.op + 1
    if before != seq_len or not log.text("seq_len"):
        with recorder.transaction():
            log.set_meta("seq_len", seq_len)
            if found:
                log.add_record(op, Shorten(**asdict(found)))
    if found:
        recorder.state.redo(op, Shorten(**asdict(found)))
        recorder.counts.update(asdict(found))
        logger.warning("seq_len: %d, and the run was at %d: of the groups that wait, %s", seq_len, before, found)


def _further_cuts(settings: PlaneSettings, recorder: Recorder, storage: Storage) -> Iterator[OverLength]:
    """What each waiting group loses that it had before."""
    for row in map(recorder.state.row_of, recorder.run_tables):
        data = recorder.log.metadata(row.op)
        if data is None:
            continue
        metadata = GroupMetadata.from_bytes(data)
        if not metadata.fits(settings.packing.seq_len):
            # A damaged frame is found, and its group set aside, when a step is planned with it.
            with suppress(PenstockError):
                again = metadata_for(settings, metadata, storage.read(row.location)[0])
                yield OverLength.of(again).since(OverLength.of(metadata))


def _numbers(data: bytes) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.frombuffer(data, "<i8")


def _samples(count: int) -> str:
    return f"{count:,} sample{'s' * (count != 1)}"
