"""How much memory this process holds, on the host and on its device, for the metrics of a step."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch


def memory() -> dict[str, float]:
    """Resident bytes of the process now, and the most its device has held; a name is left out where that is unknown."""
    found = {"perf/memory_bytes": resident_bytes()}
    if torch.cuda.is_available():
        found["perf/device_bytes"] = float(torch.cuda.max_memory_allocated())
    return {name: value for name, value in found.items() if value}


def resident_bytes() -> float:
    """As the system counts it now; where it says only what the most was, that."""
    try:
        with Path("/proc/self/statm").open(encoding="ascii") as file:
            return float(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return float(most if sys.platform == "darwin" else most * 1024)
