"""Runs a short plane and kills it at every system call that changes its folder, one after the other.

`strace` kills the process as it is about to make the n-th such call, for every kind of call and every n; a write to a
pipe counts as well. Then the same program runs again to its end in what is left of the folder. Acknowledged groups must
be known, committed steps must stay committed, every sample must be trained in exactly one step, and every step must
equal, byte for byte, that of an undisturbed run.

    scripts/torture kill-points               every call
    python -m tests.support.kill_points plane FOLDER      one run, as it is traced

Two programs: `plane` is what a user runs (`ps.open`, with its threads); `engine` makes everything that a plane
writes in one thread, so that the n-th call is always the same one.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import penstock as ps
from penstock.packing import Packing
from penstock.plane.settings import PlaneSettings, Target
from penstock.protocol import AttachValues
from tests.support.engines import DirectEngine
from tests.support.groups import named_group
from tests.support.model_run import close_engine, open_engine

CALLS = ("pwrite64", "write", "writev", "fdatasync", "fsync", "ftruncate", "unlink", "rename", "fallocate", "link")
STEPS, PER_STEP = 3, 2
TEACHER = "teacher_logprobs"
LATE: dict[str, Any] = {"needs": ("rewards", TEACHER), "needs_deadline_s": 3600.0}
EVAL_BYTES = len(ps.encode(named_group("e1", tokens=40))) * 3 // 2
"""Bytes kept of evaluation groups: one group, so that the one before it is freed."""
_LINE = re.compile(r"(\d+) +(\w+)\(")


@dataclass(slots=True)
class Said:
    """What a run of the plane reported to the outside."""

    puts: dict[str, bool] = field(default_factory=dict)
    """Acknowledged groups; whether they were new."""
    steps: dict[int, str] = field(default_factory=dict)
    """Digests of steps that were given out."""
    samples: dict[int, list[str]] = field(default_factory=dict)
    committed: set[int] = field(default_factory=set)
    closed: bool = False

    @staticmethod
    def read(text: str) -> Said:
        """Parse the complete lines of a run's output."""
        said = Said()
        for line in text.split("\n")[:-1]:
            word, *more = line.split(" ")
            if word == "put":
                said.puts[more[0]] = more[1] == "new"
            elif word == "step":
                said.steps[int(more[0])], said.samples[int(more[0])] = more[1], sorted(more[2:])
            elif word == "committed":
                said.committed.add(int(more[0]))
            else:
                said.closed = line == "closed"
        return said


# ------------------------------------------------------------------ the two lives


def live_as_plane(folder: Path, say: Callable[[str], None]) -> None:
    """Two groups, one to be evaluated, a step, and so on, through what a program uses."""
    with (
        ps.open(
            folder,
            ranks=1,
            seq_len=64,
            groups_per_step=PER_STEP,
            retain_steps=1,
            retain_eval_bytes=EVAL_BYTES,
            **LATE,
        ) as plane,
        plane.source(0) as source,
    ):
        begin = plane.status()["next_step"]
        for number in range(1, STEPS + 1):
            _put_groups(number, lambda name: plane.put(samples_of(name), evaluation=name[0] == "e"), say)
            for name, values in late_values(number).items():  # one by one: a kill may come between them
                plane.attach("rewards", {f"g{number}-0": {name: values}})
                plane.attach(TEACHER, {f"g{number}-0": {name: teacher(values)}})
            if number < begin:
                continue
            step = source.step(number, timeout=60)
            ids = [name for batch in step for name in batch.segments.ids]
            say(f"step {step.number} {step.digest} {' '.join(ids)}")
            source.commit(step, policy_version=number)
            source.flush(60)
            say(f"committed {step.number}")
        assert plane.ledger.balanced and plane.ledger.evaluation == 2 * STEPS
    say("closed")


def live_as_engine(folder: Path, say: Callable[[str], None]) -> None:
    """The same by the decisions alone, in one thread."""
    settings = PlaneSettings(
        packing=Packing(ranks=1, seq_len=64),
        target=Target(groups=PER_STEP),
        retain_steps=1,
        retain_eval_bytes=EVAL_BYTES,
        snapshot_every=3,
        **LATE,
    )
    engine = open_engine(settings, folder)
    for number in range(1, STEPS + 1):
        _put_groups(number, lambda name: put_into(engine, name), say)
        for name, value in late_values(number).items():
            engine.late.offer(name, AttachValues(ticket=1, column="rewards", values={f"g{number}-0": {name: value}}))
            assert engine.late.flush()[0].error is None
            assert engine.attach(TEACHER, {f"g{number}-0": {name: teacher(value)}}).error is None
        if number < engine.next_step:
            continue
        made = engine.stage_again(number) if number <= engine.last_step else engine.plan_step(number)
        assert not isinstance(made, str), made
        assert made.payloads[0] is not None
        say(f"step {number} {made.digests[0]} {' '.join(_ids(made.payloads[0][0]))}")
        engine.received(number)
        engine.commit(number, number)
        say(f"committed {number}")
    assert engine.ledger.balanced and engine.ledger.evaluation == 2 * STEPS
    close_engine(engine, orderly=True)
    say("closed")


def put_into(engine: DirectEngine, name: str) -> bool:
    """Put one group; False if it was known."""
    outcome = engine.put(name, name, ps.encode(samples_of(name)), evaluation=name[0] == "e")
    outcome = outcome or engine.flush()[0]
    assert outcome.error is None, outcome.error
    return not outcome.duplicate


def samples_of(name: str) -> list[ps.Sample]:
    """The samples of a group. The first group of a step gets its rewards and the teacher's log-probabilities later."""
    samples = named_group(name, tokens=40)
    if name.endswith("-0"):
        return [sample.replace(rewards=None) for sample in samples]
    return [sample.replace(**{TEACHER: teacher(0.0)}) for sample in samples]


def teacher(value: float) -> list[float]:
    """The teacher's log-probabilities of a sample."""
    return [-value - 0.25] * 40


def late_values(number: int) -> dict[str, float]:
    """The late rewards of a step, by sample."""
    return {f"g{number}-0/{i}": float(i) for i in range(2)}


def _ids(payload: bytes | bytearray | memoryview) -> tuple[str, ...]:
    return ps.decode(payload).ids


def _put_groups(number: int, put: Callable[[str], bool], say: Callable[[str], None]) -> None:
    for name in (*(f"g{number}-{i}" for i in range(PER_STEP)), f"e{number}"):
        say(f"put {name} {'new' if put(name) else 'known'}")


LIVES: dict[str, Callable[[Path, Callable[[str], None]], None]] = {"plane": live_as_plane, "engine": live_as_engine}


# ------------------------------------------------------------------ killing


@dataclass(slots=True)
class Result:
    life: str
    calls: Counter[str] = field(default_factory=Counter)
    """System calls of the run by kind, of the thread that makes the most of them."""
    points: int = 0
    """Kill points tried."""
    killed: int = 0
    """Of those, the ones at which the process died; the others were beyond its end."""
    acked: int = 0
    lost: int = 0
    doubled: int = 0
    differing: int = 0
    unfinished: int = 0
    """Lives after a kill that did not reach their end."""

    @property
    def good(self) -> bool:
        return self.killed > 0 and not (self.lost or self.doubled or self.differing or self.unfinished)


class KillPoints:
    """All kill points of one run."""

    def __init__(self, life: str, folder: Path) -> None:
        self.life, self.folder = life, folder
        folder.mkdir(parents=True, exist_ok=True)
        self.result = Result(life=life)
        whole, trace = self._live(folder / "whole", ())
        self._whole = Said.read(whole)
        assert self._whole.closed, whole
        per_thread = Counter(found.groups() for found in map(_LINE.match, trace.splitlines()) if found)
        for (_, call), count in per_thread.items():
            self.result.calls[call] = max(self.result.calls[call], count)

    def points(self) -> Iterator[tuple[str, int]]:
        """Every kind of call with every number it reaches."""
        for call, count in sorted(self.result.calls.items()):
            yield from ((call, number) for number in range(1, count + 1))

    def try_point(self, call: str, number: int, *, again: int = 0) -> None:
        """Kill, live again (and be killed there too, at the call `again` of any kind), live on to the end, judge."""
        folder = self.folder / f"{call}-{number}"
        texts = [self._live(folder, (call, number))[0]]
        if again:
            texts.append(self._live(folder, (CALLS[again % 3 * 2], again))[0])
        self.result.points += 1
        self.result.killed += not Said.read(texts[0]).closed
        texts.append(self._finish(folder))
        good = self._judge([Said.read(text) for text in texts])
        if good:
            shutil.rmtree(folder, ignore_errors=True)

    # -------------------------------------------------------------- inside

    def _live(self, folder: Path, kill: tuple[str, int] | tuple[()]) -> tuple[str, str]:
        """Return (output, trace of strace)."""
        log = self.folder / "trace"
        words = [
            "strace",
            "-f",
            "-qq",
            "-o",
            str(log),
            "-e",
            f"trace={','.join(CALLS)}",
            "-e",
            "signal=none",
        ]
        if kill:
            words += ["-e", f"inject={kill[0]}:signal=SIGKILL:when={kill[1]}"]
        words += [sys.executable, "-m", "tests.support.kill_points", self.life, str(folder)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
        if not kill and done.returncode:
            raise AssertionError(f"the whole life failed: {done.stderr[-3000:]}")
        return done.stdout, log.read_text()

    def _finish(self, folder: Path) -> str:
        lines: list[str] = []
        try:
            LIVES[self.life](folder, lines.append)
        except Exception as error:  # noqa: BLE001 - whatever it is, this life did not reach its end
            lines.append(f"failed {type(error).__name__}: {error}")
            (folder / "failure").write_text("".join(traceback.format_exception(error)))
        return "".join(f"{line}\n" for line in lines)

    def _judge(self, lives: list[Said]) -> bool:
        result, last = self.result, lives[-1]
        acked = {name for life in lives[:-1] for name in life.puts}
        lost = sum(last.puts.get(name, True) for name in acked)
        lost += sum(step in life.committed and step in last.steps for life in lives[:-1] for step in life.steps)
        given = [(step, digest) for life in lives for step, digest in life.steps.items()]
        differing = sum(self._whole.steps.get(step) != digest for step, digest in given)
        committed = {step: life.samples[step] for life in lives for step in life.committed}
        trained = Counter(name for names in committed.values() for name in names)
        expected = Counter(name for names in self._whole.samples.values() for name in names)
        missing_word = set(self._whole.steps) - set(committed)  # killed between the commit and saying so
        for step in missing_word:
            trained.update(self._whole.samples[step])
        doubled = sum((trained - expected).values()) + sum((expected - trained).values())
        result.acked += len(acked)
        result.lost += lost
        result.doubled += doubled
        result.differing += differing
        result.unfinished += not last.closed
        return last.closed and not (lost or doubled or differing)


def kill_points(
    life: str, folder: Path, *, every: int = 1, twice: bool = False, progress: Callable[[str], None] = lambda _: None
) -> Result:
    """Try every n-th kill point of a run. `twice` also kills the run after it, at a random point."""
    points = KillPoints(life, folder)
    chosen = list(points.points())[every // 2 :: every]
    for number, (call, at) in enumerate(chosen, 1):
        points.try_point(call, at, again=1 + number % 17 if twice else 0)
        progress(f"{life}: {number} of {len(chosen)}, {call} {at}")
    return points.result


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="One short life.")
    parser.add_argument("life", choices=LIVES)
    parser.add_argument("folder", type=Path)
    asked = parser.parse_args(argv)
    LIVES[asked.life](asked.folder, lambda line: print(line, flush=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
