"""A run of two writers in which one system call of one process goes wrong: the process is killed, or the call fails.

Plane, two producers, one rank, each a process. Both producers write to storage themselves; where the plane is the one
that is hit, it writes the groups of one of them. `strace` lets the n-th call of a kind kill the process, or fail with
EIO or ENOSPC, in every thread that gets that far. Then it is killed right away, or goes on; if it ends it is started
again, and puts are repeated. What must be true in the end is what `torture.py` judges by: nothing acknowledged is lost,
nothing trained twice, every step and every frame that the log names is what it would be without the fault.

    kill       at every write and sync                      scripts/torture kill-points
    EIO ...    at every sync, of the log and of segments    scripts/torture failing-syncs
    cut        write-ahead logs of a run at work, cut at random pages; believed only if nothing is missing
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from penstock.errors import Conflict, CorruptFile
from penstock.plane.opening import open_log
from penstock.plane.settings import PlaneSettings
from tests.support.processes import Notes, settings
from tests.support.torture import PRODUCERS, Run

TARGETS = ("plane-0", "producer-0")
KILLED_AT = ("pwrite64", "writev", "fdatasync", "fsync", "ftruncate", "unlink", "rename", "fallocate")
SYNCS = ("fdatasync", "fsync")
LIFE = 10
"""Groups of the run whose calls are counted. Frames of the first ones are freed within it."""
RETAIN_STEPS = 1
_REACH = 80
"""Groups within which the call of that number must come: threads differ from run to run."""
_LINE = re.compile(r"(\d+) +(\w+)\(")
CUTS = 3
"""Pages at which each copy is cut."""
_PAGE = 16384 + 24
"""Of a write-ahead log, behind its 32 bytes."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to which call of a process."""

    target: str
    call: str
    number: int
    error: str = ""
    """Empty: it is killed as it makes the call."""
    goes_on: bool = False
    """Otherwise it is killed as soon as the call has failed."""

    @property
    def words(self) -> str:
        what = f"error={self.error}" if self.error else "signal=SIGKILL"
        return f"inject={self.call}:{what}:when={self.number}"


@dataclass(slots=True)
class Total:
    """Of all faults of one kind."""

    calls: Counter[str] = field(default_factory=Counter)
    tried: int = 0
    faults: int = 0
    """Whether the fault happened: a run may make fewer calls than the one that was counted."""
    ended: int = 0
    """Processes that ended by themselves after a failed call."""
    groups: int = 0
    lost: int = 0
    doubled: int = 0
    differing: int = 0

    @property
    def good(self) -> bool:
        return self.faults > 0 and not (self.lost or self.doubled or self.differing)


class InjectedRun(Run):
    """One run, with one fault; None: only traced."""

    ranks = 1
    tail = 3

    def __init__(self, folder: Path, target: str, fault: Fault | None = None) -> None:
        super().__init__(folder, "direct", seed=0)
        self._target, self._fault = target, fault
        self._trace = folder / "trace"
        self.happened = self.ended = False

    def settings(self) -> PlaneSettings:
        return settings(self.ranks, retain_steps=RETAIN_STEPS)

    def options(self, name: str) -> list[str]:
        sends = self._target == "plane-0" and name == "producer-1"
        return [f"--retain-steps={RETAIN_STEPS}", *(["--sends"] if sends else [])]

    def prefix(self, name: str) -> list[str]:
        if name != self._target or name in self._processes:  # only its first life
            return []
        # -D: the process stays our child, and strace is the one that watches from aside.
        words = ["strace", "-D", "-f", "-qq", "-o", str(self._trace), "-e", "signal=none"]
        calls = self._fault.call if self._fault else ",".join(KILLED_AT)
        words += ["-e", f"trace={calls}"]
        return [*words, "-e", self._fault.words] if self._fault else words

    def _kill_one(self, pause_s: float) -> None:
        """Wait for the fault, then kill what it hit, unless that goes on or is dead."""
        fault = self._fault
        deadline = time.monotonic() + self.patience_s
        while not (fault and self._has_happened(fault)) and self._progress() < (_REACH if fault else LIFE):
            assert time.monotonic() < deadline, f"{fault}: stands still at {self._progress()}: {self.folder}"
            time.sleep(0.01)
        if fault is None:
            return
        self.happened = self._has_happened(fault)
        process = self._processes[self._target]
        if self.happened and fault.goes_on:
            self._await_step(self._step() + 1)
            return
        self.ended = process.poll() not in (None, -signal.SIGKILL)
        process.kill()
        process.wait()
        self.start(self._target)

    def _progress(self) -> int:
        """How far the process has come: acknowledged groups; of a producer, its own."""
        kind, number = self._target.split("-")
        producers = [int(number)] if kind == "producer" else range(PRODUCERS)
        return sum(len(Notes.read(self.folder / f"producer{n}.acked")) for n in producers)

    def _has_happened(self, fault: Fault) -> bool:
        if fault.error:
            return self._trace.exists() and "INJECTED" in self._trace.read_text()
        return self._processes[self._target].poll() is not None

    def _check_alive(self) -> None:
        if self.happened and self._processes[self._target].poll() not in (None, 0, -signal.SIGKILL):
            self.ended = True  # it could not go on after that error, as it may
            self.start(self._target)
        super()._check_alive()

    def calls(self) -> Counter[str]:
        """By kind, of the thread that made the most of them."""
        per_thread = Counter(
            found.groups() for found in map(_LINE.match, self._trace.read_text().splitlines()) if found
        )
        most: Counter[str] = Counter()
        for (_, call), number in per_thread.items():
            most[call] = max(most[call], number)
        return most


def life_of(folder: Path, target: str) -> Counter[str]:
    """Count the calls of an undisturbed run."""
    folder.mkdir(parents=True)
    run = InjectedRun(folder, target)
    result = run.go(1, lambda _: None)
    assert result.good, result
    return run.calls()


def inject(
    folder: Path,
    target: str,
    error: str = "",
    *,
    goes_on: bool = False,
    every: int = 1,
    calls: Counter[str] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Total:
    """Try every n-th fault of a kind, each in a run of its own. Folders of failed runs stay."""
    total = Total(calls=life_of(folder / f"{target}-whole", target) if calls is None else calls)
    possible = list(_faults(total.calls, target, error, goes_on=goes_on))
    # On a slow machine a life has fewer calls, for the same work: one of them is tried all the same.
    faults = possible[min(every // 2, len(possible) // 2) :: every]
    for number, fault in enumerate(faults, 1):
        place = folder / f"{fault.target}-{fault.call}-{fault.number}-{fault.error or 'kill'}-{goes_on:d}"
        place.mkdir(parents=True)
        run = InjectedRun(place, target, fault)
        result = run.go(1, lambda _: None)
        total.tried += 1
        total.faults += run.happened
        total.ended += run.ended
        total.groups += result.groups + result.evaluated
        total.lost += result.lost
        total.doubled += result.doubled
        total.differing += result.mismatches + (not result.balanced)
        if result.good:
            shutil.rmtree(place)
        progress(f"{target} {error or 'kill'}: {number} of {len(faults)}, {fault.call} {fault.number}")
    return total


def _faults(calls: Counter[str], target: str, error: str, *, goes_on: bool) -> Iterator[Fault]:
    for call in SYNCS if error else KILLED_AT:
        for number in range(1, calls[call] + 1):
            yield Fault(target, call, number, error, goes_on)


# ------------------------------------------------------------------ write-ahead logs that are cut


@dataclass(slots=True)
class Cuts:
    copies: int = 0
    """Of the folder of a plane that was stopped for a moment."""
    refused: int = 0
    """Cut copies that were not believed."""
    whole: int = 0
    """Cut copies that lacked nothing that was acknowledged, and were taken."""
    lost: int = 0

    @property
    def good(self) -> bool:
        return self.copies > 0 and self.refused > 0 and not self.lost


class CutRun(Run):
    """Copies of a run's folder at random moments; of each, the write-ahead log is cut at a random page."""

    ranks = 1
    tail = 3

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(folder, "direct", seed)
        self.cuts, self._number = Cuts(), count()

    def options(self, name: str) -> list[str]:
        return [f"--retain-steps={RETAIN_STEPS}"]

    def settings(self) -> PlaneSettings:
        return settings(self.ranks, retain_steps=RETAIN_STEPS)

    def _kill_one(self, pause_s: float) -> None:
        self._await_step(self._step() + 1)
        time.sleep(self._rng.random() * pause_s)
        copy, plane = self.folder / f"copy{next(self._number)}", self._processes["plane-0"]
        acked = self._acked()
        plane.send_signal(signal.SIGSTOP)
        try:
            shutil.copytree(self.folder / "run", copy)
        finally:
            plane.send_signal(signal.SIGCONT)
        self.cuts.copies += 1
        self._cut(copy, acked)
        assert self._opens(copy, acked), f"{copy}: not cut, and refused"
        if not self.cuts.lost:
            shutil.rmtree(copy)

    def _cut(self, copy: Path, acked: set[str]) -> None:
        pages = ((copy / "log.sqlite-wal").stat().st_size - 32) // _PAGE
        for page in {self._rng.randrange(max(pages, 1)) for _ in range(CUTS)}:
            cut = copy.with_name(f"{copy.name}-{page}")
            shutil.copytree(copy, cut)
            os.truncate(cut / "log.sqlite-wal", 32 + page * _PAGE)
            if self._opens(cut, acked):
                self.cuts.whole += 1
            else:
                self.cuts.refused += 1
            if not self.cuts.lost:
                shutil.rmtree(cut)

    def _acked(self) -> set[str]:
        return {words[0] for n in range(PRODUCERS) for words in Notes.read(self.folder / f"producer{n}.acked")}

    def _opens(self, copy: Path, acked: set[str]) -> bool:
        try:
            log = open_log(copy, self.settings())
        except (CorruptFile, Conflict):
            return False
        self.cuts.lost += len(acked - {row.id for row in log.groups()})
        log.close()
        return True


def cut_logs(folder: Path, *, copies: int, seed: int = 0, progress: Callable[[str], None] = lambda _: None) -> Cuts:
    """Copy a run's folder several times while it works, and cut the write-ahead log of each at a few pages."""
    folder.mkdir(parents=True)
    run = CutRun(folder, seed)
    result = run.go(copies, progress)
    run.cuts.lost += result.lost + result.doubled + result.mismatches
    if run.cuts.good:
        shutil.rmtree(folder)
    return run.cuts
