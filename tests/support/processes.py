"""Real processes of a small run, each started with `python -m tests.support.processes`, to be killed at any time.

    plane FOLDER URL            the plane
    producer FOLDER URL N OF    puts groups N, N + OF, ..., some also for evaluation; notes what was acknowledged
    rank FOLDER URL N OF        takes steps, notes their digests, commits, saves a checkpoint; begins again when told

Producers and ranks also note whether bytes went straight to storage and came from there. They end when the file
FOLDER/last names a step and it is trained, and with the process that `--parent` names, however that ends. `torture.py`
starts and kills them.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import penstock as ps
from penstock.client import plane_transport
from penstock.errors import PenstockError
from penstock.packing import Packing
from penstock.plane.loop import PlaneLoop
from penstock.plane.opening import open_log
from penstock.plane.settings import PlaneSettings, Target
from penstock.protocol.timeouts import Timeouts
from penstock.server.watchdog import die_with_parent
from tests.support.groups import named_group

STORED, SENT = "stored", "sent"
"""Bytes went straight to storage, or passed the plane."""
TIMEOUTS = Timeouts(heartbeat_s=0.3, peer_s=2.0, delivery_s=5.0, plane_s=30.0, resend_s=0.2)


def timeouts_at(url: str) -> Timeouts:
    """A plane that moves may need half a minute to come back, and more where a node was lost."""
    return replace(TIMEOUTS, plane_s=240.0) if url.startswith(("ray://", "postgresql://")) else TIMEOUTS


def settings(
    ranks: int,
    *,
    direct: bool = True,
    storage: str | None = None,
    retain_steps: int = 16,
    sign_puts_s: float | None = None,
) -> PlaneSettings:
    """Of every such run. Few steps are kept, so that frames and segments are freed all the time."""
    return PlaneSettings(
        packing=Packing(ranks=ranks, seq_len=64),
        target=Target(groups=2),
        run="torture",
        over_length="truncate",  # some groups are large
        untrained_groups="accept",
        max_held_bytes=120_000,
        retain_steps=retain_steps,
        direct=direct,
        storage=storage,
        sign_puts_s=sign_puts_s,
        timeouts=TIMEOUTS,
    )


def group_of(number: int) -> list[ps.Sample]:
    """The content of a group; one in eight is large."""
    return named_group(f"g{number}", samples=1 + number % 3, tokens=5000 if number % 8 == 0 else 12)


def evaluation_of(number: int) -> list[ps.Sample]:
    """The content of an evaluation group."""
    return named_group(f"e{number}", samples=2, tokens=5000 if number % 16 == 0 else 12)


class Notes:
    """Lines a process leaves behind; each is in the file as soon as it is written, whatever happens next."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, *words: object) -> None:
        os.write(self._file, (" ".join(map(str, words)) + "\n").encode())

    @staticmethod
    def read(path: Path) -> list[list[str]]:
        return [line.split(" ", 2) for line in path.read_text().splitlines()] if path.exists() else []


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process finds the others."""

    folder: Path
    """Of notes and checkpoints."""
    url: str
    keys: Path | None = None
    resumes: bool = True
    """Whether a rank sees the checkpoints of all others, and begins behind them. Otherwise the plane says where."""


def run_plane(place: Place, run: Path, asked: PlaneSettings) -> None:
    server = PlaneLoop(asked, open_log(run, asked), [plane_transport(place.url, place.keys)])
    server.run()


def run_producer(place: Place, first: int, stride: int, *, sends: bool = False) -> None:
    path = place.folder / f"producer{first}.acked"
    notes = Notes(path)
    number = first + stride * len({line[0] for line in Notes.read(path) if line[0].startswith("g")})
    plane = ps.open(place.url, timeouts=timeouts_at(place.url), keys=place.keys)
    if sends and plane._direct.writer() is not None:
        plane._direct.turn_off("--sends")
    while True:
        try:
            if number % 4 == 0:  # again, if it was killed before the other one was acknowledged
                plane.put(evaluation_of(number), evaluation=True)
                notes.write(f"e{number}", _way(plane))
            plane.put(group_of(number), timeout=1.0)
        except PenstockError:
            continue
        notes.write(f"g{number}", _way(plane))
        number += stride


def _way(plane: ps.Plane) -> str:
    """How a producer's groups go."""
    return SENT if plane._direct.writer() is None or plane._direct.is_paused else STORED


def run_rank(place: Place, rank: int, ranks: int) -> None:
    notes = Notes(place.folder / f"rank{rank}.notes")
    while True:
        try:
            _train(place, rank, ranks, notes)
        except PenstockError as error:
            notes.write("raised", time.monotonic(), f"{type(error).__name__}: {error}")
        else:
            return


def _train(place: Place, rank: int, ranks: int, notes: Notes) -> None:
    """Until the last step, or an error; a trainer begins behind the last step whose weights all ranks have saved."""
    folder, url = place.folder, place.url
    begin = 1 + min(_saved(folder, other) for other in range(ranks)) if place.resumes else None
    with ps.connect(
        url, rank=rank, world=ranks, resume_step=begin, run="torture", timeouts=timeouts_at(url), keys=place.keys
    ) as source:
        for step in source.steps():
            reader = source._reach.reader
            notes.write("step", step.number, step.digest, SENT if reader is None else reader.bytes_read)
            source.commit(step, policy_version=step.number)
            _save(folder, rank, step.number)
            if step.number == _last(folder):
                source.flush(60)
                notes.write("done", step.number)
                return


def _saved(folder: Path, rank: int) -> int:
    path = folder / f"rank{rank}.checkpoint"
    return int(path.read_text()) if path.exists() else 0


def _save(folder: Path, rank: int, step: int) -> None:
    temporary = folder / f".rank{rank}.checkpoint"
    temporary.write_text(str(step))
    temporary.rename(folder / f"rank{rank}.checkpoint")


def _last(folder: Path) -> int:
    path = folder / "last"
    return int(path.read_text()) if path.exists() else -1


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="One process of a small run.")
    parser.add_argument("kind", choices=["plane", "producer", "rank"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("url")
    parser.add_argument("number", type=int)
    parser.add_argument("of", type=int)
    parser.add_argument("--parent", type=int, help="the process that starts this one: it is killed when that ends")
    parser.add_argument("--inline", action="store_true", help="all bytes pass the plane")
    parser.add_argument("--sends", action="store_true", help="what this producer puts passes the plane")
    parser.add_argument("--run", type=Path, help="the folder of the log; `run` in FOLDER by default")
    parser.add_argument("--storage", help="where frames are; in the folder of the log by default")
    parser.add_argument("--sign-puts-s", type=float, help="producers write with signed URLs")
    parser.add_argument("--retain-steps", type=int, default=16)
    parser.add_argument("--keys", type=Path)
    parser.add_argument("--alone", action="store_true", help="the checkpoints of other ranks are on other hosts")
    asked = parser.parse_args(argv)
    if asked.parent and not die_with_parent(asked.parent, signal.SIGKILL):
        return 1
    place = Place(asked.folder, asked.url, asked.keys, resumes=not asked.alone)
    if asked.kind == "plane":
        made = settings(
            asked.of,
            direct=not asked.inline,
            storage=asked.storage,
            retain_steps=asked.retain_steps,
            sign_puts_s=asked.sign_puts_s,
        )
        run_plane(place, asked.run or asked.folder / "run", made)
    elif asked.kind == "producer":
        run_producer(place, asked.number, asked.of, sends=asked.sends)
    else:
        run_rank(place, asked.number, asked.of)
    return 0


if __name__ == "__main__":
    sys.exit(main())
