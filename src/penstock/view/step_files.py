"""Write one rank's file of one step: which records are kept, and the file up to the marker that confirms it is on disk.

A rule for keeping records is a frozen object: all, every n-th, the first n, or the n worst by mismatch KL. `start`
returns its state for one step of one rank.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec
import xxhash

from penstock.errors import ConfigError
from penstock.view.folders import Done, PackedBatch, publish, write_done
from penstock.view.jsonl import MalformedLine, parse_line
from penstock.view.record import Record
from penstock.view.tallies import NOTHING, Summary


class Choice:
    """The state of a rule during one step. This one keeps the first of every `k` records, at most `limit` in all."""

    def __init__(self, k: int = 1, limit: int | None = None) -> None:
        self._k, self._limit, self._seen = k, limit, 0

    def offer(self, record: Record) -> bool:  # noqa: ARG002 - other rules look at it
        """Return whether to write the record now."""
        index, self._seen = self._seen, self._seen + 1
        return index % self._k == 0 and (self._limit is None or index // self._k < self._limit)

    def finish(self) -> Iterator[Record]:
        """Return the records to write at the end of the step."""
        return iter(())


class Keep(Protocol):
    """A rule for keeping records."""

    def start(self) -> Choice: ...


@dataclass(frozen=True, slots=True)
class Everything:
    """Keep every record."""

    def start(self) -> Choice:
        return Choice()


@dataclass(frozen=True, slots=True)
class _Counted:
    n: int

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ConfigError(f"{type(self).__name__}({self.n}): must be at least 1")


class EveryKth(_Counted):
    """Keep the first record of a step and every n-th after it."""

    def start(self) -> Choice:
        return Choice(k=self.n)


class First(_Counted):
    """Keep the first n records of a step."""

    def start(self) -> Choice:
        return Choice(limit=self.n)


class Worst(_Counted):
    """Keep the n records with the largest mismatch KL on a trained token, the earlier ones on a tie.

    They are held in memory until the step ends, so n bounds the memory.
    """

    def start(self) -> Choice:
        return _Worst(self.n)


class _Worst(Choice):
    def __init__(self, n: int) -> None:
        super().__init__()
        self._n = n
        self._heap: list[tuple[float, int, Record]] = []

    def offer(self, record: Record) -> bool:
        # The number breaks ties, so two records are never compared.
        entry = (record.worst_kl, -self._seen, record)
        self._seen += 1
        if len(self._heap) < self._n:
            heapq.heappush(self._heap, entry)
        else:
            heapq.heappushpop(self._heap, entry)
        return False

    def finish(self) -> Iterator[Record]:
        return (record for _, _, record in sorted(self._heap, key=lambda entry: -entry[1]))


# ------------------------------------------------------------------ the file


class Sink(Protocol):
    """Writes one file in a format."""

    def append(self, records: list[Record]) -> None:
        """Write the records of one micro-batch."""

    def finish(self) -> None:
        """Write what the format has buffered. The file stays open."""


class Format(Protocol):
    """Makes sinks."""

    suffix: str
    needs: str
    """The module of an extra that it imports."""

    def __call__(self, file: BinaryIO, /) -> Sink: ...


class HashedFile:
    """A file opened for writing that hashes what is written."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=1 << 18)
        self._hash = xxhash.xxh3_128()
        self.num_bytes = 0
        self.closed = False

    def write(self, data: bytes) -> int:
        self._hash.update(data)
        self.num_bytes += len(data)
        return self._file.write(data)

    def writelines(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            self.write(line)

    def tell(self) -> int:
        return self.num_bytes

    def flush(self) -> None:
        self._file.flush()

    def digest(self) -> str:
        return self._hash.hexdigest()

    def sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self.closed = True
        self._file.close()


@dataclass(slots=True, kw_only=True)
class StepFile:
    """A file being written. Invisible to readers until `finish`."""

    folder: Path
    rank: int
    format: Format
    choice: Choice
    max_bytes: int | None
    micro_batches: list[PackedBatch] = field(default_factory=list)
    summary: Summary = NOTHING
    written: int = 0
    skipped: int = 0
    _file: HashedFile | None = None
    _sink: Sink | None = None

    @property
    def part(self) -> Path:
        return self.folder / f".{self.name}.part"

    @property
    def name(self) -> str:
        return f"rank_{self.rank}.{self.format.suffix}"

    def open(self, step: int) -> None:
        """Start the file. Keeps complete lines of earlier trainer steps from an interrupted attempt."""
        earlier: list[bytes] = []
        if self.format.suffix == "jsonl":
            earlier, self.summary = _lines_before(self.part, step)
        self._file = HashedFile(self.part)
        self._sink = self.format(self._file)  # type: ignore[arg-type]
        self._file.writelines(earlier)
        self.written = len(earlier)

    def add(self, records: Iterable[Record]) -> None:
        """Write the chosen records of a micro-batch."""
        chosen = []
        for record in records:
            self.summary = self.summary.plus(Summary.of(record))
            if self.choice.offer(record):
                chosen.append(record)
            else:
                self.skipped += 1
        self._write(chosen)

    def _write(self, records: list[Record]) -> None:
        assert self._file is not None and self._sink is not None
        if self.max_bytes is not None and self._file.num_bytes >= self.max_bytes:
            self.skipped += len(records)
            return
        for number, record in enumerate(records, self.written):
            record.fields["export_sequence_idx"] = number
        self._sink.append(records)
        self.written += len(records)

    def finish(self, done: Done) -> None:
        """Sync and rename the file, then write the marker `done` completed with the file's size, digest and counts."""
        assert self._file is not None and self._sink is not None
        held = list(self.choice.finish())
        self.skipped -= len(held)
        self._write(held)
        self._sink.finish()
        self._file.sync()
        self._file.close()
        publish(self.part, self.folder / self.name)
        done = msgspec.structs.replace(
            done,
            file=self.name,
            num_bytes=self._file.num_bytes,
            digest=self._file.digest(),
            records=self.written,
            skipped=self.skipped,
            summary=self.summary,
            micro_batches=self.micro_batches,
        )
        write_done(self.folder, done)

    def abandon(self) -> None:
        """Close the unfinished file. It stays invisible, and the next attempt replaces it."""
        if self._file is not None and not self._file.closed:
            with suppress(OSError):
                self._file.close()


def _lines_before(part: Path, step: int) -> tuple[list[bytes], Summary]:
    """Return the lines of earlier trainer steps, and their summary.

    A run's step may span several trainer steps, and those before the restart are not trained again.
    """
    kept, summary = [], NOTHING
    with suppress(FileNotFoundError), part.open("rb") as file:
        for line in file:
            with suppress(MalformedLine):
                record = parse_line(line)
                if line.endswith(b"\n") and record.fields["step"] is not None and record.fields["step"] < step:
                    kept.append(line)
                    summary = summary.plus(Summary.of(record))
    return kept, summary
