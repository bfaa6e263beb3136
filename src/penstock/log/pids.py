"""Checks whether a process of this machine is alive, by its pid. A pid is valid in one boot and one pid namespace."""

from __future__ import annotations

import os
import sys
import uuid
from pathlib import Path

_BOOT, _NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")


def is_alive(pid: int) -> bool:
    """Return whether a process with this pid exists in our pid namespace.

    >>> is_alive(os.getpid())
    True
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # another user's process, or a number that is no pid: we cannot say it ended
        return True
    return True


def pid_space() -> str:
    """Return a name for the machine's boot and this process's pid namespace, or "" if the system does not tell."""
    try:
        return f"{_BOOT.read_text().strip()} {_NAMESPACE.readlink()}"
    except OSError:
        # macOS and the BSDs have no /proc and no pid namespaces: the machine is enough there. A pid that another
        # process has after a reboot counts as alive, which is the harmless mistake.
        return "" if sys.platform == "linux" else f"{sys.platform} {uuid.getnode():012x}"


def is_gone(space: str, pid: int) -> bool:
    """Return whether a process is known to have ended. False if it may live, or its pid is of another namespace.

    >>> is_gone(pid_space(), os.getpid()), is_gone("another machine", 2**22)
    (False, False)
    """
    return pid > 0 and bool(space) and space == pid_space() and not is_alive(pid)
