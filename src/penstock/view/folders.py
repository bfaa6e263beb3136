"""The folder layout of exports, and the write order that separates finished steps from half-written ones.

    <folder>/token_exports/step_12/rank_0.jsonl      records of one rank, complete or absent
    <folder>/token_exports/step_12/rank_0.done       that rank has synced its file: count, size, digest, summary
    <folder>/token_exports/step_12/STABLE            every rank has; an empty file
    <folder>/<run>/token_exports/...                 the same for a named run

A file grows as `.rank_0.jsonl.part`, is synced, then renamed; its marker follows, then STABLE. When a
step is written again after a restart, its STABLE and this rank's marker are removed first. The finished file of the
earlier attempt stays next to the new one as `rank_0.jsonl.1`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote, unquote

import msgspec
import xxhash

from penstock.atomic import folder_errors, read_small, rename, replacing, sync
from penstock.errors import Conflict, CorruptFile, StorageError
from penstock.view.tallies import Count, Summary

EXPORTS = "token_exports"
STABLE = "STABLE"
_MARKER = re.compile(r"rank_(\d{1,9})\.done")
_STEP = re.compile(r"step_(\d{1,18})")
_MAX_FOLDER = 200
_UNSAFE = re.compile(r"[^A-Za-z0-9_]")
_DIGESTED = re.compile(r"[A-Za-z0-9_]{1,100}~[0-9a-f]{32}")
_mutex = threading.Lock()
_held: set[Path] = set()
"""Locks held by this process: a POSIX record lock excludes only other processes."""


class PackedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """How a micro-batch was packed, for the drawing on the step page."""

    step: Count
    micro_step: Count
    tokens: Count
    """Computed tokens, including padding."""
    padding: Count
    samples: list[Count]
    """Tokens of each."""
    modality: str
    is_dummy: bool


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's marker: its part of a step is on disk."""

    rank: Count
    world: Count
    attempt: str
    """The start of the run that wrote it. STABLE requires the same on every rank."""
    file: str = ""
    num_bytes: Count = 0
    digest: str = ""
    """xxh3-128 of the file."""
    records: Count = 0
    skipped: Count = 0
    """Records left out by sampling or by the size limit."""
    seconds: float | None = None
    """Time since the end of the previous trainer step, None if unknown."""
    summary: Summary | None = None
    """Over all sequences of the step on this rank, exported or not."""
    micro_batches: list[PackedBatch] = []
    metrics: dict[str, float | None] = {}
    """Passed by the training loop. None for values that were not finite."""


# Made at import: msgspec crashes when two threads are the first to decode a type.
_READ = msgspec.json.Decoder(Done)


def exports_of(folder: Path, run: str) -> Path:
    """Return the export folder of a run. `run` is "" if there is only one."""
    return folder / folder_of(run) / EXPORTS if run else folder / EXPORTS


def folder_of(run: str) -> str:
    """Return the folder name of a run. Producers choose names, and none may lead elsewhere or stop the trainer.

    >>> folder_of("exp-7"), folder_of("exp 7"), folder_of("../x"), folder_of("a" * 300)[95:105]
    ('exp-7', 'exp%207', '%2E.%2Fx', 'aaaaa~5e56')
    """
    if _DIGESTED.fullmatch(run):
        return run  # as `run_of` returned it
    name = quote(run, safe="", errors="replace")
    # A name in parentheses is the viewer's own.
    if not run.isprintable() or run[0] == "(" or len(name) > _MAX_FOLDER:
        digest = xxhash.xxh3_128_hexdigest(run.encode(errors="surrogatepass"))
        return f"{_UNSAFE.sub('_', run)[:100]}~{digest}"
    return f"%{ord(name[0]):02X}{name[1:]}" if name[0] in ".-" else name  # no hidden file, no flag of a command


def run_of(name: str) -> str:
    """Return the run whose folder has this name. A name that was too long or odd for a folder stays shortened."""
    run = unquote(name)
    return run if folder_of(run) == name else name


def step_folder(folder: Path, run: str, step: int) -> Path:
    return exports_of(folder, run) / f"step_{step}"


def step_number(name: str) -> int | None:
    """Return the number in a step folder's name, None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def make_folder(path: Path) -> None:
    """Create a folder. Some shared filesystems report FileExistsError in spite of exist_ok."""
    with folder_errors(path):
        try:
            path.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            if not path.is_dir():
                raise StorageError(f"{path}: exists and is not a folder; move it away") from None


def reopen(path: Path, rank: int) -> None:
    """Prepare a step for writing: remove markers of an earlier attempt that call it finished."""
    make_folder(path)
    for name in (STABLE, f"rank_{rank}.done"):
        with suppress(FileNotFoundError):
            (path / name).unlink()
            sync(path)


def publish(part: Path, final: Path) -> None:
    """Rename a synced file to its final name. A file of that name is kept under a number."""
    if final.exists():
        numbers = (n for n in range(1, 1 << 30) if not Path(f"{final}.{n}").exists())
        os.link(final, f"{final}.{next(numbers)}")
    rename(part, final)


def write_done(path: Path, done: Done) -> None:
    """Write a rank's marker atomically. Raises, without writing, if it could not be read back."""
    marker = path / f"rank_{done.rank}.done"
    data = msgspec.json.format(msgspec.json.encode(done), indent=1)
    _decoded(data, marker, done.rank)
    with replacing(marker) as file:
        file.write(data)


def read_done(path: Path, rank: int) -> Done | None:
    """Read a rank's marker, None if there is none."""
    marker = path / f"rank_{rank}.done"
    try:
        return _decoded(read_small(marker), marker, rank)
    except FileNotFoundError:
        return None


def _decoded(data: bytes, marker: Path, rank: int) -> Done:
    try:
        done = _READ.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptFile(
            f"{marker}: not a rank's marker: {error}; export the step again or remove its folder"
        ) from None
    # The name is checked because it is opened later: a marker must not lead to any file but its rank's.
    if done.rank != rank or not re.fullmatch(rf"rank_{rank}\.\w{{1,16}}", done.file, re.ASCII):
        raise CorruptFile(f"{marker}: says rank {done.rank}, file {done.file[:80]!r}; export the step again")
    return done


def marked_ranks(path: Path) -> list[int]:
    """List the ranks with a marker in a step's folder."""
    return sorted(int(match[1]) for one in path.iterdir() if (match := _MARKER.fullmatch(one.name)))


def all_done(path: Path, attempt: str, world: int) -> bool:
    """Return whether every rank of this attempt has finished."""
    marks = (read_done(path, rank) for rank in range(world))
    return all(mark is not None and (mark.attempt, mark.world) == (attempt, world) for mark in marks)


def promote(path: Path) -> None:
    """Mark the step as finished. Several ranks may do so at once."""
    (path / STABLE).touch()
    sync(path)


def steps_in(exports: Path) -> Iterator[tuple[int, Path]]:
    """Step folders, by number."""
    found = []
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(exports) as entries:
        found = [
            (number, exports / name) for entry in entries if (number := step_number(name := entry.name)) is not None
        ]
    return iter(sorted(found))


class RankLock:
    """Excludes a second exporter of the same rank, which would write into the same file.

    Held until `release` or the end of the process. Forked children do not inherit it.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        """Raise Conflict if another exporter has it."""
        self._pid, self._path = os.getpid(), folder.resolve() / f".rank_{rank}.lock"
        with _mutex:
            if self._path in _held:
                raise _taken(folder, rank, "this process")
            with folder_errors(self._path):
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    holder = os.pread(self._file, 32, 0).decode(errors="replace").strip() or "unknown"
                    os.close(self._file)
                    raise _taken(folder, rank, f"process {holder}") from None
                # a filesystem without locks: continue without one
            os.pwrite(self._file, f"{os.getpid():<16}\n".encode(), 0)
            _held.add(self._path)

    def release(self) -> None:
        with _mutex:
            if self._path in _held and os.getpid() == self._pid:
                _held.discard(self._path)
                os.close(self._file)


def _taken(folder: Path, rank: int, holder: str) -> Conflict:
    return Conflict(
        f"{folder}: another exporter of rank {rank} ({holder}) writes here; give each process its own rank=, and "
        "export from one process of each rank"
    )
