"""How the plane's process holds memory: what it freed it uses again, and what it has loaded is not looked at again.

Every step frees some tens of megabytes and needs them again at the next. Left alone, the C library gives them back to
the system each time, and taking them anew, page by page, costs about as much as building the step does. And Python
looks at all objects of all modules whenever it looks for cycles. `tests/server/test_allocation.py` counts the pages.
"""

from __future__ import annotations

import ctypes
import gc

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""As in <malloc.h>."""
KEPT_BYTES = 128 << 20
"""Freed memory that is not given back, per arena."""
LARGE_BYTES = 32 << 20
"""Blocks from this size on come from the system one by one and go back to it at once."""


def settle_memory() -> None:
    """Call once, when everything is loaded; where the C library has no such choice, nothing happens."""
    gc.collect()
    gc.freeze()
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_MMAP_THRESHOLD, LARGE_BYTES)
