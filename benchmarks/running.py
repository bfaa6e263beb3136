"""Running the programs of `benchmarks.programs` beside one another, in whichever interpreter has what they need.

A program that has rivals in it runs in a network namespace of its own where only loopback is up: nothing that a
rival does can leave the machine.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

PROGRAMS = Path(__file__).parent / "programs"
START_S = 300.0
"""Ray and TransferQueue take up to two minutes to start on a busy machine."""
ROUND_S = 600.0


class WayFailed(Exception):
    """A program did not start, or a round in it failed; the text says why."""


class Program:
    """A running system: requests rounds and reads their results."""

    def __init__(
        self, module: str, *, python: str = sys.executable, folder: Path, ranks: int = 4, alone: bool = False
    ) -> None:
        """`ranks` is the most that a round will ask for; `alone` runs it without a network."""
        arguments = [python, "-m", f"programs.{module}", str(folder), str(ranks)]
        if alone:
            arguments = [*_without_network(), *arguments]
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the program
        self._process = subprocess.Popen(
            arguments, env=_environment(python), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log
        )
        self.offers: tuple[str, ...] = ()
        """The systems it can run; set once it is `ready`."""
        self.versions: dict[str, str] = {}

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self) -> None:
        """Until it is ready."""
        answer = self._answer(START_S)
        self.offers, self.versions = tuple(answer["offers"]), answer["versions"]

    def round(self, **request: Any) -> dict[str, float]:
        """Run one round; what it took."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WayFailed(self._last_words()) from None
        answer = self._answer(ROUND_S)
        if "error" in answer:
            raise WayFailed(str(answer["error"]))
        return answer

    def close(self) -> None:
        """Its input ends, so it ends; if it does not, it is killed."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                continue
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline, line = time.monotonic() + timeout_s, b""
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                raise WayFailed(f"no answer in {timeout_s:g} s")
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                raise WayFailed(self._last_words())
            line += data
        found: dict[str, Any] = json.loads(line)
        return found

    def _last_words(self) -> str:
        code = self._process.wait(60)
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f"ended with code {code}: {lines[-1][:200] if lines else 'no output'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A program to start, if it can be."""

    module: str
    python: str | None = sys.executable
    """None: there is no interpreter for it."""
    absent: str = ""
    """What to say when there is none."""
    needs: str = ""
    """A module that its interpreter must have."""
    alone: bool = False


@contextmanager
def started(
    wanted: dict[str, Wanted], folder: Path, ranks: int = 4
) -> Iterator[tuple[dict[str, Program], dict[str, str]]]:
    """The programs that started, all at once, and why each of the others did not."""
    running: dict[str, Program] = {}
    why: dict[str, str] = {}
    try:
        for name, want in wanted.items():
            reason = _missing(want)
            if want.python is None or reason:
                why[name] = reason
                continue
            running[name] = Program(want.module, python=want.python, folder=folder, ranks=ranks, alone=want.alone)
        for name in list(running):
            try:
                running[name].wait()
            except WayFailed as error:
                why[name] = str(error)
                running.pop(name).close()
        yield running, why
    finally:
        for program in running.values():
            program.close()


def _missing(want: Wanted) -> str:
    """Why a program cannot be started; "" if it can."""
    if want.python is None:
        return want.absent
    if want.alone and not _isolates():
        return "rivals run without a network, and no namespace can be made; run as root, or allow user namespaces"
    if want.needs and not _has(want.python, want.needs):
        return f"{want.needs} is not installed in {want.python}"
    return ""


def _has(python: str, module: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0


def _without_network() -> Sequence[str]:
    """Return a command prefix that leaves only loopback visible."""
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    return ["unshare", *user, "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]


def _isolates() -> bool:
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    return subprocess.run([*_without_network(), "true"], capture_output=True, check=False).returncode == 0


def _environment(python: str) -> dict[str, str]:
    """Return this process's environment with `programs` importable, and our Penstock only in our interpreter."""
    paths = [str(PROGRAMS.parent)]
    if python == sys.executable:
        paths += [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    return os.environ | quiet | {"PYTHONPATH": os.pathsep.join(paths)}
