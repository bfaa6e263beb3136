"""A run as its log tells it: what was decided, in order, with the frames that its storage still has.

The plane may be at work meanwhile. What the log says is read once, in one consistent state. Frames are read one by one,
later: one that was freed in between is `Gone`, which is a normal answer for a run that does not keep everything.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import xxhash

from penstock.errors import CorruptFile, InvalidInput
from penstock.log import FORMAT, LOG, LogReader, State, is_run, reading
from penstock.plane import SETTINGS, read_manifest
from penstock.runs.read_log import storage_of_run
from penstock.storage import Gone, KeptStorage

_KINDS: msgspec.msgpack.Decoder[tuple[tuple[str, str], ...]] = msgspec.msgpack.Decoder(tuple[tuple[str, str], ...])


@dataclass(frozen=True, slots=True)
class GroupEntry:
    """A group that was accepted."""

    op: int
    """The decision's number: the order in which groups arrived."""
    id: str
    digest: bytes
    """XXH3-128 of its frame."""
    policy_version: int | None
    samples: int
    tokens: int
    size: int
    """Bytes of its frame."""
    run: str
    prompt: str
    kinds: tuple[tuple[str, str], ...]
    """What all groups of a step must have in common, by column."""
    evaluation: bool
    at: float
    """Seconds since 1970 at which it was accepted."""
    location: str
    """Of its frame; empty where that was freed."""


@dataclass(frozen=True, slots=True)
class RecordEntry:
    """Any other decision: versions published, priorities, quarantine, shares."""

    op: int
    data: bytes


@dataclass(frozen=True, slots=True)
class StepEntry:
    """A step that was trained."""

    step: int
    op: int
    """The decision by which its groups were drawn."""
    groups: tuple[int, ...]
    """By op, in the order in which they were drawn."""
    digests: tuple[str, ...]
    """Per rank, of its plan and samples; empty where the plan was freed."""


@dataclass(slots=True)
class RecordedRun:
    """What a run's folder says of the run."""

    folder: Path
    storage: KeptStorage
    run: str = ""
    run_id: str = ""
    retains_all: bool = False
    settings: list[tuple[int, str]] = field(default_factory=list)
    """(first decision they hold for, the settings as plane.toml has them), in order."""
    groups: dict[int, GroupEntry] = field(default_factory=dict)
    records: dict[int, RecordEntry] = field(default_factory=dict)
    steps: dict[int, StepEntry] = field(default_factory=dict)
    """By number."""
    gone: set[int] = field(default_factory=set)
    """Groups whose frames were freed after the log was read."""

    @classmethod
    def open(cls, folder: str | Path) -> RecordedRun:
        """Read what a run's log says, beside its plane or long after. Raises InvalidInput if there is no log."""
        root = Path(folder)
        if not is_run(root):
            raise InvalidInput(f"{root}: no {LOG} in it; give the folder that a plane was opened on")
        found = cls(root, storage_of_run(root))
        with reading(root) as log:
            found._read(log)
        return found

    def _read(self, log: LogReader) -> None:
        meta = log.all_meta()
        if int(meta.get("format", FORMAT)) != FORMAT:
            raise CorruptFile(f"{log.where}: format {meta['format']}; this version reads format {FORMAT}")
        self.run_id, self.retains_all = meta.get("run_id", ""), meta.get("retain") == "all"
        texts = ((name, meta[name]) for name in sorted(meta) if name.startswith(SETTINGS))
        self.settings = [(int(name.removeprefix(SETTINGS)), text) for name, text in texts]
        self.run = "" if not self.settings else str(tomllib.loads(self.settings[-1][1]).get("run", ""))
        self.groups = {entry.op: entry for entry in _groups(log)}
        self.records = {op: RecordEntry(op, data) for op, data in log.rows("SELECT op, data FROM records")}
        query = "SELECT step, op, manifest FROM steps WHERE step < ? ORDER BY step"
        for step, op, data in log.rows(query, (int(meta.get("next_step", 1)),)):
            manifest = read_manifest(data)
            self.steps[step] = StepEntry(step, op, manifest.groups, manifest.digests)

    def has_frame(self, op: int) -> bool:
        return bool(self.groups[op].location) and op not in self.gone

    @property
    def num_frames(self) -> int:
        return sum(map(self.has_frame, self.groups))

    @property
    def num_bytes(self) -> int:
        """Of all frames."""
        return sum(entry.size for entry in self.groups.values() if self.has_frame(entry.op))

    def frame(self, op: int) -> bytes:
        """A group's frame. Raises Gone if it was freed meanwhile, CorruptFile if it is not as it was written."""
        entry = self.groups[op]
        try:
            frame = bytes(self.storage.read(entry.location)[0])
            if len(frame) == entry.size and xxhash.xxh3_128_digest(frame) == entry.digest:
                return frame
            words = f"{self.storage.url}: the frame of group {entry.id!r} at {entry.location} is not as it was written"
        except Gone as error:
            words = f"group {entry.id!r}: {error}"
        # The log forgets a location before its bytes are deleted: so this tells damage from a frame that was freed.
        if self._is_freed(op):
            self.gone.add(op)
            raise Gone(f"group {entry.id!r}: its frame was freed meanwhile")
        raise CorruptFile(f"{words}; restore the storage from a copy")

    def _is_freed(self, op: int) -> bool:
        with reading(self.folder) as log:
            return not log.location_at(op)

    def in_order(self) -> Iterator[GroupEntry]:
        """The groups whose frames are kept, as they arrived."""
        return (self.groups[op] for op in sorted(self.groups) if self.has_frame(op))

    def verify(self) -> int:
        """Read every frame; returns how many. Raises CorruptFile at the first that is damaged; counts those `gone`."""
        read = 0
        for entry in self.in_order():
            try:
                self.frame(entry.op)
            except Gone:
                continue
            read += 1
        return read


def _groups(log: LogReader) -> Iterator[GroupEntry]:
    rows = log.rows(
        "SELECT op, id, digest, policy_version, samples, tokens, size, run, prompt, kinds, state, at, location "
        "FROM groups ORDER BY op"
    )
    for row in rows:
        values = list(row)
        values[9], values[10] = _KINDS.decode(row[9]), row[10] == State.EVALUATION
        yield GroupEntry(*values)
