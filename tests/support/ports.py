"""A TCP port for a test that must name it before anything listens there.

Asking the kernel for a free port and closing it again is a race: the next connection of any process may get the same
number. So this takes one below the range that the kernel gives out, and holds a name for it, so that two test processes
never take the same. Prefer port 0 and the address that the plane prints, or `ipc://`, where a test can.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST, _USUAL = 10_000, 32_768


def free_port() -> int:
    """Return a port of 127.0.0.1 that no other process is given while this one lives.

    >>> 1024 < free_port() < 65536
    True
    """
    highest = min(int(_RANGE.read_text().split()[0]), _USUAL) if _RANGE.exists() else _USUAL
    if highest <= _LOWEST:
        return _given_by_kernel()
    count = highest - _LOWEST
    for offset in range(count):
        # Processes start at different places, so that few of them meet.
        port = _LOWEST + (os.getpid() * 97 + offset) % count
        if _lock(port):
            return port
    raise OSError(f"no free port from {_LOWEST} to {highest - 1}")


def _lock(port: int) -> bool:
    lock = socket.socket(socket.AF_UNIX)
    try:
        lock.bind(f"\0penstock-port-{port}")  # a name without a file: it goes when this process ends
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
    except OSError:
        lock.close()
        return False
    lock.detach()  # held until this process ends: a server may be restarted at its port
    return True


def _given_by_kernel() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
