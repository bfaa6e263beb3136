"""Faults that a plane must outlive, each provoked on a real plane: what was done, and whether the promise held.

    disk       puts fill a small filesystem: training drains what was accepted, then puts are taken again by themselves
    poison     groups with absurd versions, groups unlike the others, tiny groups that unfold to gigabytes
    fork       a handle used in a forked child raises at once, and the child does not keep the folder
    nan        metrics that are no numbers break nothing that looks
    world      a restart with another number of ranks is refused with both values, and goes on with the right one

`scripts/torture --faults` runs them. Each returns how often it tried; a broken promise raises AssertionError.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import penstock as ps
from penstock.errors import Closed, DiskFull, FlowError, PenstockError
from penstock.frames.layout import PREFIX_SIZE, assemble
from penstock.protocol.timeouts import Timeouts
from tests.support.groups import named_group
from tests.support.pace import pace

TIMEOUTS = Timeouts(heartbeat_s=0.5, peer_s=10.0, delivery_s=20.0, plane_s=60.0, resend_s=0.5)
PATIENCE_S = 120.0
DISK_BYTES = 48 << 20
TOKENS = 20_000
"""Of the groups that fill the disk."""


@dataclass(slots=True, kw_only=True)
class Result:
    """What came out of one fault."""

    fault: str
    tries: int = 0
    lost: int = 0
    """Groups that were acknowledged and never trained."""
    slowest_s: float = 0.0
    """The longest the plane took to answer meanwhile."""
    words: str = "held"

    @property
    def good(self) -> bool:
        return self.words == "held" and not self.lost


def open_plane(folder: Path, **settings: Any) -> ps.Plane:
    """A small plane in this process."""
    small = {"ranks": 1, "seq_len": 64, "groups_per_step": 2, "over_length": "truncate", "timeouts": TIMEOUTS}
    small["untrained_groups"] = "accept"
    return ps.open(folder, **{**small, **settings})


# ------------------------------------------------------------------ the disk


def fill_disk(folder: Path) -> Result:
    """Run in a mount namespace of its own, with `folder` on a small filesystem."""
    result = Result(fault="disk")
    accepted: list[str] = []
    trained: set[str] = set()
    with open_plane(folder / "run", retain_steps=0) as plane:
        for _ in range(3):  # filled and drained; then writes succeed again without help
            accepted += _put_until_full(plane, len(accepted), result)
            trained |= _drain(plane)
        accepted += _put_until_full(plane, len(accepted), result)
    with open_plane(folder / "run", retain_steps=0) as plane:  # a full volume never prevents a start
        trained |= _drain(plane)
        assert plane.ledger.balanced
    result.lost = max(len(set(accepted) - trained) - 1, 0)  # an odd one waits for its pair
    return result


def _put_until_full(plane: ps.Plane, first: int, result: Result) -> list[str]:
    names: list[str] = []
    while True:
        name = f"g{first + len(names)}"
        try:
            plane.put(named_group(name, tokens=TOKENS), timeout=20)
        except DiskFull:
            result.tries += 1
            assert names, "nothing was taken before the disk was full"
            return names
        names.append(name)
        assert len(names) < 5000, "the disk never filled"


def _drain(plane: ps.Plane) -> set[str]:
    """Take and commit steps as long as there are groups for one; the groups trained."""
    trained: set[str] = set()
    with plane.source(0, prefetch=0) as source:
        while True:
            state = plane.status()
            if state["held_groups"] < 2 and state["last_step"] < state["next_step"]:
                return trained
            trained |= _take(source)


def _take(source: ps.Source, policy_version: int | None = None) -> set[str]:
    """One step, trained; its groups."""
    step = source.step(timeout=PATIENCE_S)
    source.commit(step, policy_version=policy_version)
    source.flush(PATIENCE_S)
    return {group for batch in step for group in batch.segments.groups}


def disk(folder: Path) -> Result:
    mount = f'mount -t tmpfs -o size={DISK_BYTES} none "$1" && exec "$2" -m tests.support.faults fill "$1"'
    words = ["unshare", "-rm", "sh", "-c", mount, "sh", str(folder), sys.executable]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    tries, lost = map(int, done.stdout.split())
    return Result(fault="disk", tries=tries, lost=lost)


# ------------------------------------------------------------------ poison


def poison(folder: Path) -> Result:
    """No accepted group stops the others, kills the plane, or makes it die at every start."""
    result = Result(fault="poison")
    for number, (bad, count, per_step) in enumerate(_POISONS):
        good = {f"good{i}" for i in range(count)}
        with open_plane(folder / f"run{number}", groups_per_step=per_step) as plane, answering(plane, result):
            result.tries += _put_bad(plane, bad())
            for name in sorted(good):
                plane.put(named_group(name), timeout=PATIENCE_S)
        with open_plane(folder / f"run{number}", groups_per_step=per_step) as plane, answering(plane, result):
            trained: set[str] = set()
            with plane.source(0) as source:
                while not good <= trained:
                    trained |= _take(source)
            assert plane.ledger.balanced
    assert result.slowest_s < 1.0 * pace(), f"the plane did not answer for {result.slowest_s:.1f} s"
    return result


def _put_bad(plane: ps.Plane, groups: Iterator[tuple[str, bytes]]) -> int:
    """Put them; whether each is refused or taken is the plane's business."""
    count = 0
    for name, frame in groups:
        count += 1
        try:
            plane.put_frame(name, frame, timeout=PATIENCE_S)
        except FlowError:
            raise
        except PenstockError:
            continue
    return count


def absurd_versions() -> Iterator[tuple[str, bytes]]:
    """Frames as a hostile worker would forge them: our own `Sample` may refuse to make them."""
    known = 2**40 + 12345
    for i, version in enumerate([2**63 - 1, 2**62, -(2**63), 1_763_000_000_000_000_000] * 2):
        frame = ps.encode(named_group(f"version{i}", policy_version=known))
        yield f"version{i}", forged(frame, known.to_bytes(8, "little"), (version % 2**64).to_bytes(8, "little"))


def forged(frame: bytes, old: bytes, new: bytes) -> bytes:
    """The frame with other bytes in its head, and checksums that fit."""
    header_size, head_size = (int.from_bytes(frame[at : at + 4], "little") for at in (12, 16))
    behind = PREFIX_SIZE + header_size
    head = frame[behind : behind + head_size]
    assert old in head
    return b"".join(assemble(frame[PREFIX_SIZE:behind], [head.replace(old, new)], [frame[behind + head_size :]]))


def without_logprobs() -> Iterator[tuple[str, bytes]]:
    """Groups that go with one another but not with those that come later, which are fewer."""
    for i in range(600):
        yield f"bare{i}", ps.encode([sample.replace(logprobs=None) for sample in named_group(f"bare{i}")])


def bombs(tokens: int = 1 << 27) -> Iterator[tuple[str, bytes]]:
    """Frames of less than 400 bytes each that claim this many tokens."""
    for i in range(20):
        frame = ps.encode([ps.Sample(id="a", group=f"bomb{i}", token_ids=np.full(1 << 20, 7))])
        header_size, head_size = (int.from_bytes(frame[at : at + 4], "little") for at in (12, 16))
        behind = PREFIX_SIZE + header_size
        header = msgspec.msgpack.decode(frame[PREFIX_SIZE:behind])
        header[1], header[3] = tokens, [0]  # the length of its one sample stands first in the head, here in 3 bytes
        head = (tokens.to_bytes(8, "little") + frame[behind + 3 : behind + head_size]).rstrip(b"\0")
        body = frame[behind + head_size :]
        yield f"bomb{i}", b"".join(assemble(msgspec.msgpack.encode(header), [head], [body]))


_POISONS: tuple[tuple[Callable[[], Iterator[tuple[str, bytes]]], int, int], ...] = (
    (absurd_versions, 8, 2),
    (without_logprobs, 640, 32),
    (bombs, 8, 2),
)
"""Bad groups, how many good ones follow, and how many make a step."""


@contextmanager
def answering(plane: ps.Plane, result: Result) -> Iterator[None]:
    """Ask for the status all the while, and note the longest time an answer took."""
    stop = threading.Event()

    def ask() -> None:
        while not stop.wait(0.05):
            began = time.monotonic()
            try:
                plane.status()
            except Closed:
                return
            result.slowest_s = max(result.slowest_s, time.monotonic() - began)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


# ------------------------------------------------------------------ fork, NaN, another world


def fork(folder: Path) -> Result:
    """In the child every use raises at once; the parent goes on, and its folder is free when it closes."""
    result = Result(fault="fork")
    uses: tuple[Callable[[ps.Plane], object], ...] = (
        lambda plane: plane.status(),
        lambda plane: plane.put(named_group("child"), timeout=1),
        lambda plane: plane.source(0),
    )
    for number, use in enumerate(uses):
        plane = open_plane(folder / f"run{number}")
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            _use_in_child(plane, use, write_end)
        os.close(write_end)
        said = os.read(read_end, 100).decode()
        plane.put(named_group("parent"), timeout=PATIENCE_S)
        plane.close()
        open_plane(folder / f"run{number}").close()  # while the child lives
        os.close(read_end)
        os.kill(child, 9)
        os.waitpid(child, 0)
        result.tries += 1
        assert said.startswith("PenstockError"), f"in the child: {said!r}"
    return result


def _use_in_child(plane: ps.Plane, use: Callable[[ps.Plane], object], write_end: int) -> None:
    began, word = time.monotonic(), "nothing was raised"
    try:
        use(plane)
    except PenstockError as error:
        word = f"PenstockError {type(error).__name__}"
    except BaseException as error:  # noqa: BLE001 - it is told to the parent
        word = type(error).__name__
    if time.monotonic() - began > 2.0 * pace():
        word = f"only after {time.monotonic() - began:.1f} s: {word}"
    os.write(write_end, word.encode())
    time.sleep(3600)  # until the parent ends it: a child that lives must not keep the folder


def nan(folder: Path) -> Result:
    """Reported metrics of NaN and infinity: status, joining and the commands go on."""
    result = Result(fault="nan")
    with open_plane(folder / "run") as plane:
        for number, value in enumerate((float("nan"), float("inf"), float("-inf")), 1):
            for i in range(2):
                plane.put(named_group(f"g{number}-{i}"), timeout=PATIENCE_S)
            with plane.source(0) as source:
                step = source.step(timeout=PATIENCE_S)
                source.report(step, metrics={"loss": value, "good": 1.0})
                source.commit(step)
                source.flush(PATIENCE_S)
                shown = plane.status()["reported"]
                assert shown["loss"] is None and shown["good"] == 1.0, shown
            result.tries += 1
        assert plane.ledger.balanced
    return result


def world(folder: Path) -> Result:
    """A restart with another number of ranks and a step planned trains every group once."""
    result = Result(fault="world")
    with open_plane(folder / "run", ranks=2) as plane:
        for i in range(8):
            plane.put(named_group(f"g{i}"), timeout=PATIENCE_S)
        first = _take_with(plane, 2)
        with _ranks(plane, 2) as sources:
            sources[0].step(timeout=PATIENCE_S)  # planned, and not trained
    trained = first
    for ranks in (1, 3, 4):
        with open_plane(folder / "run", ranks=ranks) as plane:
            groups = _take_with(plane, ranks)
            assert not groups & trained, f"with {ranks} ranks {groups & trained} are trained again"
            trained |= groups
            with _ranks(plane, ranks) as sources:
                if ranks < 4:
                    sources[0].step(timeout=PATIENCE_S)  # planned, and not trained
        result.tries += 1
    result.lost = 8 - len(trained)
    return result


def _take_with(plane: ps.Plane, ranks: int) -> set[str]:
    """Train one step with this many ranks at once. Returns its groups."""
    groups: set[str] = set()
    with _ranks(plane, ranks) as sources:
        for source in sources:
            groups |= {group for batch in source.step(timeout=PATIENCE_S) for group in batch.segments.groups}
        for source in sources:
            source.commit(plane.status()["next_step"])
        for source in sources:
            source.flush(PATIENCE_S)
    return groups


@contextmanager
def _ranks(plane: ps.Plane, ranks: int) -> Iterator[list[ps.Source]]:
    """Make a source for each rank."""
    with ExitStack() as opened:
        yield [opened.enter_context(plane.source(rank)) for rank in range(ranks)]


FAULTS: dict[str, Callable[[Path], Result]] = {"disk": disk, "poison": poison, "fork": fork, "nan": nan, "world": world}


def provoke(fault: str, folder: Path) -> Result:
    """Provoke one of the faults. The error names what broke."""
    folder.mkdir(parents=True)
    try:
        return FAULTS[fault](folder)
    except Exception as error:  # noqa: BLE001 - whatever it is, a promise was broken
        return Result(fault=fault, words=f"{type(error).__name__}: {error}"[:300])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fill the disk under a folder.")
    parser.add_argument("what", choices=["fill"])
    parser.add_argument("folder", type=Path)
    result = fill_disk(parser.parse_args(argv).folder)
    print(result.tries, result.lost)
    return 0


if __name__ == "__main__":
    sys.exit(main())
