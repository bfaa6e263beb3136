"""Ranks and producers as separate processes that report on a pipe what happens to them.

    python -m tests.support.farm rank URL RANK WORLD STEPS TIMEOUTS        takes and commits steps
    python -m tests.support.farm producer URL FIRST COUNT TOKENS TIMEOUTS  puts groups

with `--keys DIR` where the plane needs them.

Each line on stdout is JSON: {"at": monotonic seconds, "step": 3, "digest": ...}, {"put": "g4", "new": true},
{"error": "StepAborted", "words": ...} or {"done": true}. `Worker` starts one and reads them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import msgspec

import penstock as ps
from penstock.errors import PenstockError
from penstock.protocol.timeouts import Timeouts
from penstock.server.watchdog import die_with_parent
from tests.support.forked import Forked
from tests.support.groups import named_group


class Worker:
    """One such process."""

    def __init__(self, *words: object, timeouts: Timeouts, prefix: tuple[str, ...] = ()) -> None:
        """`prefix` comes before the command, as in `ip netns exec NAME`."""
        own = [*map(str, words), _pack(timeouts), f"--parent={os.getpid()}"]
        read_end, write_end = os.pipe()
        self._lines = os.fdopen(read_end, encoding="utf-8")
        self.process: Forked | subprocess.Popen[bytes]
        if prefix:
            command = [*prefix, sys.executable, "-m", "tests.support.farm", *own]
            self.process = subprocess.Popen(command, stdout=write_end)
        else:
            self.process = Forked("tests.support.farm", own, stdout=write_end)
        os.close(write_end)
        self.said: list[dict[str, Any]] = []
        """Everything so far."""
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        for line in self._lines:
            with self._news:
                self.said.append(json.loads(line))
                self._news.notify_all()

    def wait(self, key: str, value: object = None, timeout_s: float = 300.0) -> dict[str, Any]:
        """The first thing it says that has this key, and value if one is given."""

        def found() -> dict[str, Any] | None:
            return next((line for line in self.said if key in line and value in (None, line[key])), None)

        with self._news:
            self._news.wait_for(found, timeout_s)
            line = found()
        if line is None:
            raise AssertionError(f"no {key} {value} within {timeout_s:g} s, but {self.said[-3:]}")
        return line

    @property
    def digests(self) -> dict[int, str]:
        """Of the steps it took."""
        return {line["step"]: line["digest"] for line in self.said if "step" in line}

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self._thread.join()
        self._lines.close()


def say(**what: object) -> None:
    sys.stdout.write(json.dumps({"at": time.monotonic(), **what}) + "\n")
    sys.stdout.flush()


def run_rank(url: str, rank: int, world: int, steps: int, timeouts: Timeouts, keys: str | None) -> None:
    with ps.connect(url, rank=rank, world=world, timeouts=timeouts, keys=keys) as source:
        say(joined=rank)
        for step in source.steps():
            say(step=step.number, digest=step.digest)
            source.commit(step)
            if step.number == steps:
                source.flush(60)
                return


def run_producer(url: str, first: int, count: int, tokens: int, timeouts: Timeouts, keys: str | None) -> None:
    with ps.open(url, timeouts=timeouts, keys=keys) as plane:
        for number in range(first, first + count):
            say(put=f"g{number}", new=plane.put(named_group(f"g{number}", tokens=tokens)))


def _pack(timeouts: Timeouts) -> str:
    return msgspec.json.encode(timeouts).decode()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A rank, or a producer, that says what happens to it.")
    parser.add_argument("kind", choices=["rank", "producer"])
    parser.add_argument("url")
    parser.add_argument("numbers", type=int, nargs=3)
    parser.add_argument("timeouts")
    parser.add_argument("--keys")
    parser.add_argument("--parent", type=int, help="the process that starts this one: it is killed when that ends")
    asked = parser.parse_args(argv)
    if asked.parent and not die_with_parent(asked.parent, signal.SIGKILL):
        return 1
    timeouts = msgspec.json.decode(asked.timeouts, type=Timeouts)
    first, second, third = asked.numbers
    work = run_rank if asked.kind == "rank" else run_producer
    try:
        work(asked.url, first, second, third, timeouts, asked.keys)
    except PenstockError as error:
        say(error=type(error).__name__, words=str(error))
        return 1
    say(done=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
