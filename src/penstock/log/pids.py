"""Whether a process of this machine has ended, by its pid. A pid counts within one boot and one pid namespace only."""

from __future__ import annotations

import os
from pathlib import Path

_BOOT, _NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")


def pid_space() -> str:
    """Name the machine's boot and this process's pid namespace; empty where the system does not say."""
    try:
        return f"{_BOOT.read_text().strip()} {_NAMESPACE.readlink()}"
    except OSError:
        return ""


def is_gone(space: str, pid: int) -> bool:
    """Return whether a process is known to have ended. False where it may live, or counts in another namespace.

    >>> is_gone(pid_space(), os.getpid()), is_gone("another machine", 2**22)
    (False, False)
    """
    if pid <= 0 or not space or space != pid_space():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False
