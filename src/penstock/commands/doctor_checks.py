"""What `penstock doctor` examines: versions, extras, sockets, disk, limits; one function each."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import zmq

from penstock.commands.tables import size
from penstock.extras import DISTRIBUTION, EXTRAS, install
from penstock.transport import PlaneKeys, SocketPlane
from penstock.version import __version__

Verdict = Literal["ok", "warning", "failure"]
_NEEDED = ("numpy", "msgspec", "pyzmq", "zstandard", "xxhash")
_SYNCS = 30
_TRY_IMPORTS = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
        said = ""
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    print("tried", name, said.replace(chr(10), " ")[:300], flush=True)
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


def examine(folder: Path) -> list[Finding]:
    """All checks, in order; one that breaks is itself a finding."""
    checks: list[Callable[[], Iterator[Finding]]] = [
        _versions,
        _sqlite,
        _extras,
        _loopback,
        _curve,
        lambda: _disk(folder),
        _limits,
    ]
    found: list[Finding] = []
    for check in checks:
        try:
            found += check()
        except Exception as error:  # noqa: BLE001 - a doctor reports what it did not expect, and goes on
            name = getattr(check, "__name__", "check").strip("_<>") or "check"
            found.append(Finding(name=name, verdict="failure", text=f"{type(error).__name__}: {error}"))
    return found


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
    there = {name: extra for name, extra in EXTRAS.items() if extra.installed}
    broken = import_failures({module for extra in there.values() for module in extra.modules})
    works = [name for name, extra in there.items() if broken.keys().isdisjoint(extra.modules)]
    text = f"imported: {', '.join(works) or 'none'}"
    absent = [f"{name} ({extra.purpose})" for name, extra in EXTRAS.items() if name not in there]
    if absent:
        text += f"; not installed: {', '.join(absent)}; {install('NAME')} adds one"
    yield Finding(name="extras", verdict="ok", text=text)
    for name, extra in there.items():
        for module in broken.keys() & set(extra.modules):
            text = f"{name}: installed, but {module} cannot be imported: {broken[module]}; {install(name)} again"
            yield Finding(name="extras", verdict="warning", text=text)


def import_failures(modules: Iterable[str]) -> dict[str, str]:
    """Which of these cannot be imported, and why: tried in another process, which an import may even end."""
    failed: dict[str, str] = {}
    todo = sorted(modules)
    while todo:
        command = [sys.executable, "-c", _TRY_IMPORTS, *todo]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own program
        tried = [line.split(" ", 2)[1:] for line in done.stdout.splitlines() if line.startswith("tried ")]
        failed |= {name: said for name, said in tried if said}
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
    SocketPlane("tcp://127.0.0.1:*", keys=plane).close()  # refuses to open unless unknown keys are refused
    yield Finding(name="keys", verdict="ok", text=f"libzmq {version} with CURVE; unknown keys are refused (tried)")


def sync_times(folder: Path, count: int) -> list[float]:
    """Seconds that each of `count` writes of 64 KiB takes to become durable there, in order of size."""
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
    text = "" if folder.is_dir() else f"{folder} is not there yet; tried the folder above it. "
    text += f"{there}: durable in {middle * 1e3:.1f} ms (p50), {slow * 1e3:.1f} ms (p99); "
    text += f"about {1 / middle:,.0f} commits/s; {size(shutil.disk_usage(there).free)} free"
    late = slow > 0.06
    if late:
        text += "; slower than 60 ms: acknowledgements will be, too; keep runs on a local disk"
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
