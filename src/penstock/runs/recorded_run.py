"""A run as its log recorded it: every decision in order, with the frames that its storage still has.

The plane may be at work meanwhile. The log is read once, in one consistent state. Frames are read one by one, later: a
frame that was freed in between raises `Gone`, which is a normal answer for a run that does not keep everything.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import xxhash

from penstock.arrays import ALL_OR_NONE, MAX_VERSION, TOPK, Sample, Samples
from penstock.errors import CorruptFile
from penstock.frames import NO_LATE, GroupMetadata, attach_late, decode, encode
from penstock.log import AwaitColumns, Awaited, GroupRow, LogReader, read_record, reading
from penstock.plane import SETTINGS, read_manifest
from penstock.runs.run_log import reading_run, storage_of_run
from penstock.storage import Gone, KeptStorage, parse_location

_LAST_SECOND = 253_402_300_799
"""Of the year 9999: a later time cannot be printed."""
_MAX_SETTINGS, _MAX_DOTS = 1 << 20, 500
"""Characters of the recorded settings, and dots in a line of them."""


@dataclass(frozen=True, slots=True)
class RecordEntry:
    """A decision that is neither a group nor a step: versions published, priorities, quarantine, shares."""

    op: int
    data: bytes


@dataclass(frozen=True, slots=True)
class StepEntry:
    """A step that was trained."""

    step: int
    op: int
    """Number of the decision that drew its groups."""
    groups: tuple[int, ...]
    """Ops of its groups, in the order in which they were drawn."""
    digests: tuple[str, ...]
    """Per rank, the digest of its plan and samples; empty if the plan was freed."""
    oldest_version: int = 0
    """Tokens of earlier policy versions were left out of the loss."""
    packing: str = ""
    """The packing settings of its plan, as TOML, which may be newer than those it was drawn with; empty if the plan was
    freed, and in runs of earlier versions."""


@dataclass(slots=True)
class RecordedRun:
    """A run's decisions, and access to its frames."""

    folder: Path
    storage: KeptStorage
    run: str = ""
    run_id: str = ""
    retains_all: bool = False
    settings: list[tuple[int, str]] = field(default_factory=list)
    """(first op they apply to, settings as TOML), in order. A plane restarted with other settings adds an entry."""
    groups: dict[int, GroupRow] = field(default_factory=dict)
    records: dict[int, RecordEntry] = field(default_factory=dict)
    steps: dict[int, StepEntry] = field(default_factory=dict)
    """By number."""
    gone: set[int] = field(default_factory=set)
    """Groups whose frames were freed after the log was read."""

    @classmethod
    def open(cls, folder: str | Path) -> RecordedRun:
        """Read a run's log, while its plane works or long after. Raises InvalidInput if there is no log."""
        root = Path(folder)
        with reading_run(root) as (log, meta):
            found = cls(root, storage_of_run(root))
            found._read(log, meta)
        return found

    def _read(self, log: LogReader, meta: dict[str, str]) -> None:
        self.run_id, self.retains_all = meta.get("run_id", ""), meta.get("retain") == "all"
        texts = ((name, meta[name]) for name in sorted(meta) if name.startswith(SETTINGS))
        self.settings = [(int(name.removeprefix(SETTINGS)), text) for name, text in texts]
        self.run = "" if not self.settings else str(recorded_settings(self.settings[-1][1]).get("run", ""))
        self.groups = {row.op: _checked(row, log.where) for row in log.groups()}
        self.records = {op: RecordEntry(op, data) for op, data in log.rows("SELECT op, data FROM records")}
        query = "SELECT step, op, manifest FROM steps WHERE step < ? ORDER BY step"
        for step, op, data in log.rows(query, (log.meta("next_step", 1),)):
            if not isinstance(op, int):
                raise CorruptFile(f"{log.where}: step {step}: its decision is {op!r:.40}, and must be a number")
            manifest = read_manifest(data)
            if unknown := [group for group in manifest.groups if group not in self.groups]:
                raise CorruptFile(f"{log.where}: step {step} has group {unknown[0]}, which the log does not have")
            self.steps[step] = StepEntry(
                step, op, manifest.groups, manifest.digests, manifest.oldest_version, manifest.packing
            )

    def has_frame(self, op: int) -> bool:
        return bool(self.groups[op].location) and op not in self.gone

    @property
    def num_frames(self) -> int:
        return sum(map(self.has_frame, self.groups))

    @property
    def num_bytes(self) -> int:
        """Bytes of all frames that are kept."""
        return sum(parse_location(one.location).size for one in self.groups.values() if self.has_frame(one.op))

    def frame(self, op: int) -> bytes:
        """Read a group's frame, or the newer one that it has since a late column was attached. Raises Gone if it was
        freed meanwhile, CorruptFile if its bytes have changed."""
        while True:
            entry = self.groups[op]
            try:
                frame = bytes(self.storage.read(entry.location)[0])
                if xxhash.xxh3_128_digest(frame) == entry.digest:
                    return frame
                problem = (
                    f"{self.storage.url}: the frame of group {entry.id!r} at {entry.location} is not as it was written"
                )
            except Gone as error:
                problem = f"group {entry.id!r}: {error}"
            # The log forgets a location before its bytes are deleted. So if the log still has it, the frame is damaged.
            if not self._has_moved(op):
                raise CorruptFile(f"{problem}; restore the storage from a copy")

    def _has_moved(self, op: int) -> bool:
        """Return whether a group has another frame by now, and note where. Raises Gone if it has none."""
        with reading(self.folder) as log:
            rows = list(log.groups_of([op]))
        if not rows or not rows[0].location:
            self.gone.add(op)
            raise Gone(f"group {self.groups[op].id!r}: its frame was freed meanwhile")
        before, now = self.groups[op], rows[0]
        self.groups[op] = replace(before, location=now.location, digest=now.digest)
        return now.location != before.location

    def complete_frame(self, op: int) -> bytes:
        """Read a group's frame, with the values that were attached after its put and without samples that were left
        out because of them. Raises like `frame`."""
        frame, late = self.frame(op), NO_LATE
        if not self.groups[op].is_evaluation:
            with reading(self.folder) as log:
                data = log.metadata(op)
            if self._has_moved(op):  # the metadata may be that of the newer frame
                return self.complete_frame(op)
            late = NO_LATE if data is None else GroupMetadata.from_bytes(data).late
        if not late:
            return frame
        samples = attach_late(decode(frame), late.arrays())
        out = late.left_out or bytes(len(samples))
        if all(out):
            raise Gone(f"group {self.groups[op].id!r}: dropped when its late values came; no sample of it was trained")
        kept = samples.take([i for i in range(len(samples)) if not out[i]])
        return bytes(encode(_without_partial(kept, late.digests)))

    def awaited(self) -> dict[str, Awaited]:
        """Return what groups waited for when they were put, by id."""
        found: dict[str, Awaited] = {}
        for entry in self.records.values():
            record = read_record(entry.data)
            if isinstance(record, AwaitColumns):
                found |= record.groups
        return found

    def in_order(self) -> Iterator[GroupRow]:
        """Return the groups whose frames are kept, in order of arrival."""
        return (self.groups[op] for op in sorted(self.groups) if self.has_frame(op))

    def verify(self) -> int:
        """Read every frame and return their number. Raises CorruptFile at the first damaged one; skips freed ones."""
        read = 0
        for entry in self.in_order():
            try:
                self.frame(entry.op)
            except Gone:
                continue
            read += 1
        return read


def _checked(row: GroupRow, where: str) -> GroupRow:
    """Raise CorruptFile if a row has numbers that no plane writes. What reads them adds them up and prints them."""
    if not isinstance(row.location, str):
        raise CorruptFile(f"{where}: group {row.id!r:.60}: location is {row.location!r:.40}, and must be text")
    for name in ("op", "samples", "tokens", "size", "at"):
        value, most = getattr(row, name), _LAST_SECOND if name == "at" else MAX_VERSION
        if not isinstance(value, (int, float)) or not 0 <= value <= most:
            raise CorruptFile(
                f"{where}: group {row.id!r:.60}: {name} is {value!r:.40}; from 0 to {most:,} are possible"
            )
    return row


def recorded_settings(text: str) -> dict[str, Any]:
    """Read settings as a log holds them. Raises CorruptFile for what no plane writes: time and memory of the reader
    grow with the square of the depth of a name."""
    dots = max((line.count(".") for line in text.splitlines()), default=0)
    if len(text) > _MAX_SETTINGS or dots > _MAX_DOTS:
        raise CorruptFile(
            f"the recorded settings: {len(text)} characters with {dots} dots in a line; at most {_MAX_SETTINGS} and "
            f"{_MAX_DOTS} are read"
        )
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptFile(f"the recorded settings cannot be read: {error}") from None


def _without_partial(samples: Samples, late: Iterable[str]) -> Sequence[Sample]:
    """Return the samples of a group without late columns that only some of them have yet: a put needs all or none."""
    partial = [name for name in late if name in ALL_OR_NONE and not samples[name].lengths.all()]
    gone = {name: None for column in partial for name in (TOPK if column in TOPK else (column,))}
    return [sample.replace(**gone) for sample in samples] if gone else samples
