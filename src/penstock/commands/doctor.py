"""Check this installation and this machine, in plain language.

  penstock doctor                  one line per check; exit code 1 if something essential fails
  penstock doctor runs             also measure how fast the disk under that folder makes writes durable
  penstock doctor runs/demo        also check that the run there can be read and its ledger balances
  penstock doctor tcp://127.0.0.1:7440     also check that the plane there answers
  penstock doctor --imports        also import every package of the extras, in a process of its own: takes a while
  penstock doctor --json           the same for programs

Changes nothing: files and sockets that a check needs are removed again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Literal

import zmq

from penstock.commands.terminal import size
from penstock.commands.which_run import RUN_HELP, asking, checked_where, is_address, plane_folder
from penstock.errors import InvalidInput, PenstockError
from penstock.extras import DISTRIBUTION, EXTRAS, install
from penstock.transport import PlaneKeys, SocketPlane
from penstock.version import __version__

Verdict = Literal["ok", "warning", "failure"]
_NEEDED = ("numpy", "msgspec", "pyzmq", "zstandard", "xxhash")
_SYNCS = 30
_WIDTH, _NAME_WIDTH = 100, len("open files")
_MARKS = {"ok": "ok   ", "warning": "note ", "failure": "FAIL "}
_TRY_IMPORTS = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
        problem = ""
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    print("tried", name, problem.replace(chr(10), " ")[:300], flush=True)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The outcome of one check."""

    name: str
    verdict: Verdict
    text: str
    """For people: what was found, and what to do about it."""
    value: float | None = None
    """The number behind it, if there is one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "where", metavar="FOLDER|RUN", nargs="?", type=checked_where, help=f"where runs are kept, or {RUN_HELP}"
    )
    parser.add_argument("--keys", type=Path, metavar="DIR", help="key folder, for a plane that needs one")
    parser.add_argument("--imports", action="store_true", help="import the packages of the extras: are they intact?")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    where = args.where or ""
    folder, findings = Path() if "://" in where else Path(where), list[Finding]()
    for finding in chain(examine(folder, imports=args.imports), examine_run(where, args.keys)):
        findings.append(finding)
        if not args.json:
            print(_line(finding), flush=True)
    healthy = all(finding.verdict != "failure" for finding in findings)
    if args.json:
        print(json.dumps({"healthy": healthy, "findings": [asdict(finding) for finding in findings]}, indent=1))
    else:
        works = "Everything essential works."
        print(f"\n{works if healthy else 'Something essential does not work: see the lines marked FAIL.'}")
    return 0 if healthy else 1


def _line(finding: Finding) -> str:
    start = f"{_MARKS[finding.verdict]} {finding.name.ljust(_NAME_WIDTH)}  "
    lines = textwrap.wrap(finding.text, _WIDTH - len(start), break_long_words=False, break_on_hyphens=False)
    return start + f"\n{' ' * len(start)}".join(lines)


# ------------------------------------------------------------------ this machine


def examine(folder: Path, *, imports: bool = False) -> Iterator[Finding]:
    """Run all checks in order. A check that raises becomes a failed finding."""
    checks: list[Callable[[], Iterator[Finding]]] = [
        _versions,
        _sqlite,
        _import_extras if imports else _extras,
        _loopback,
        _curve,
        lambda: _disk(folder),
        _limits,
    ]
    for check in checks:
        try:
            yield from check()
        except Exception as error:  # noqa: BLE001 - report the unexpected and go on
            name = getattr(check, "__name__", "check").strip("_<>") or "check"
            yield Finding(name=name, verdict="failure", text=f"{type(error).__name__}: {error}")


def _versions() -> Iterator[Finding]:
    old = sys.version_info < (3, 11)
    yield Finding(
        name="python",
        verdict="failure" if old else "ok",
        text=f"{platform.python_version()} on {platform.system()} {platform.machine()}"
        + ("; Penstock needs 3.11 or later" if old else ""),
    )
    missing = [name for name in _NEEDED if not _version(name)]
    versions = ", ".join(f"{name} {_version(name)}" for name in _NEEDED if _version(name))
    lacks = f"; missing: {', '.join(missing)}; install {DISTRIBUTION} again" if missing else ""
    yield Finding(name="penstock", verdict="failure" if missing else "ok", text=f"{__version__} with {versions}{lacks}")


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _sqlite() -> Iterator[Finding]:
    old = sqlite3.sqlite_version_info < (3, 24)
    text = f"SQLite {sqlite3.sqlite_version}" + ("; the log needs 3.24 or later" if old else "")
    yield Finding(name="log", verdict="failure" if old else "ok", text=text)


def _extras() -> Iterator[Finding]:
    there = [name for name, extra in EXTRAS.items() if extra.installed]
    text = f"installed: {', '.join(there) or 'none'}; --imports tries to import them"
    yield Finding(name="extras", verdict="ok", text=text)
    yield from _absent()


def _absent() -> Iterator[Finding]:
    absent = [f"{name} ({extra.purpose})" for name, extra in EXTRAS.items() if not extra.installed]
    if absent:
        text = f"not installed: {', '.join(absent)}; {install('NAME')} adds one"
        yield Finding(name="extras", verdict="ok", text=text)


def _import_extras() -> Iterator[Finding]:
    there = {name: extra for name, extra in EXTRAS.items() if extra.installed}
    broken = import_failures({module for extra in there.values() for module in extra.modules})
    works = [name for name, extra in there.items() if broken.keys().isdisjoint(extra.modules)]
    yield Finding(name="extras", verdict="ok", text=f"imported: {', '.join(works) or 'none'}")
    yield from _absent()
    for name, extra in there.items():
        for module in broken.keys() & set(extra.modules):
            text = f"{name}: installed, but {module} cannot be imported: {broken[module]}; {install(name)} again"
            yield Finding(name="extras", verdict="warning", text=text)


def import_failures(modules: Iterable[str]) -> dict[str, str]:
    """Return the modules that cannot be imported, with the reason.

    Tried in another process, because an import may end its process. The modules after the fatal one are then tried
    in a new one: of a, b, c with b fatal, the first process tries a and b, the second c.
    """
    failed: dict[str, str] = {}
    todo = sorted(modules)
    while todo:
        command = [sys.executable, "-c", _TRY_IMPORTS, *todo]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own program
        tried = [line.split(" ", 2)[1:] for line in done.stdout.splitlines() if line.startswith("tried ")]
        failed |= {name: problem for name, problem in tried if problem}
        todo = todo[len(tried) :]
        if todo:
            failed[todo.pop(0)] = f"the process that imported it ended with code {done.returncode}"
    return failed


def _loopback() -> Iterator[Finding]:
    with contextlib.closing(socket.socket()) as listener:
        try:
            listener.bind(("127.0.0.1", 0))
            listener.listen(1)
            with contextlib.closing(socket.create_connection(listener.getsockname(), timeout=2)):
                text = f"a port on 127.0.0.1 can be bound and reached (tried {listener.getsockname()[1]})"
                yield Finding(name="loopback", verdict="ok", text=text)
        except OSError as error:
            yield Finding(name="loopback", verdict="failure", text=f"127.0.0.1 cannot be used: {error.strerror}")


def _curve() -> Iterator[Finding]:
    version = zmq.zmq_version()
    if not zmq.has("curve"):
        text = f"libzmq {version} has no CURVE; planes can serve this host only; install pyzmq from PyPI"
        yield Finding(name="keys", verdict="warning", text=text)
        return
    public, secret = zmq.curve_keypair()
    mine, _ = zmq.curve_keypair()
    plane = PlaneKeys(public=public, secret=secret, allowed=frozenset([mine]))
    SocketPlane("tcp://127.0.0.1:*", keys=plane).close()  # raises unless unknown keys are rejected
    yield Finding(name="keys", verdict="ok", text=f"libzmq {version} with CURVE; unknown keys are rejected (tried)")


def sync_times(folder: Path, count: int) -> list[float]:
    """Time `count` writes of 64 KiB with a disk sync each. Returns seconds, sorted."""
    times = []
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".penstock-doctor-") as file:
        for _ in range(count):
            file.write(bytes(1 << 16))
            file.flush()
            begin = time.perf_counter()
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - begin)
    return sorted(times)


def _disk(folder: Path) -> Iterator[Finding]:
    there = next(path for path in [folder.resolve(), *folder.resolve().parents] if path.is_dir())
    if folder.exists() and not folder.is_dir():
        text = f"{folder}: not a folder; give a folder where runs can be kept"
        yield Finding(name="disk", verdict="failure", text=text)
        return
    try:
        times = sync_times(there, _SYNCS)
    except OSError as error:
        text = f"{there} cannot be written: {error.strerror}; give a folder where runs can be kept"
        yield Finding(name="disk", verdict="failure", text=text)
        return
    middle, slow = times[len(times) // 2], times[int(len(times) * 0.99)]
    text = "" if folder.is_dir() else f"{folder} does not exist yet; tried the folder above it. "
    text += f"{there}: durable in {middle * 1e3:.1f} ms (p50), {slow * 1e3:.1f} ms (p99); "
    text += f"about {1 / middle:,.0f} commits/s; {size(shutil.disk_usage(there).free)} free"
    late = slow > 0.06
    if late:
        text += "; slower than 60 ms, and so is every acknowledgement; keep runs on a local disk"
    yield Finding(name="disk", verdict="warning" if late else "ok", text=text, value=middle)


def _limits() -> Iterator[Finding]:
    for name, what, least in (("open files", resource.RLIMIT_NOFILE, 1024), ("processes", resource.RLIMIT_NPROC, 256)):
        soft, _ = resource.getrlimit(what)
        low = soft != resource.RLIM_INFINITY and soft < least
        shown = "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft:,}"
        text = shown + (f"; raise it to {least:,} with ulimit" if low else "")
        yield Finding(
            name=name,
            verdict="warning" if low else "ok",
            text=text,
            value=None if soft == resource.RLIM_INFINITY else soft,
        )


# ------------------------------------------------------------------ a run


def examine_run(where: str, keys: Path | None) -> Iterator[Finding]:
    """Check the plane at an address or the run in a folder. Yields nothing for a folder without a run."""
    if is_address(where):
        yield _at_work(where, keys)
        return
    try:
        folder = plane_folder(where)
    except InvalidInput:
        return
    yield _in_folder(folder)


def _at_work(url: str, keys: Path | None) -> Finding:
    begin = time.monotonic()
    try:
        with asking(url, keys) as plane:
            status = plane.status()
    except PenstockError as error:
        return Finding(name="plane", verdict="failure", text=f"{url}: {error}")
    took = time.monotonic() - begin
    text = (
        f"{url}: run {status['run']!r} answers in {took * 1e3:.0f} ms; epoch {status['epoch']}, next step "
        f"{status['next_step']}, waiting for {status['waiting_for']}"
    )
    return Finding(name="plane", verdict="ok", text=text, value=took)


def _in_folder(folder: Path) -> Finding:
    from penstock.runs import read_run

    try:
        found = read_run(folder, steps=1, groups=0)
    except PenstockError as error:
        return Finding(name="run", verdict="failure", text=str(error))
    balanced = found["ledger"]["balanced"]
    text = (
        f"{folder}: epoch {found['epoch']}, next step {found['next_step']}, {found['held_groups']:,} groups held; "
        f"the ledger is {'balanced' if balanced else 'NOT BALANCED; keep the folder and report it'}"
    )
    return Finding(name="run", verdict="ok" if balanced else "failure", text=text)
