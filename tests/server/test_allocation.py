"""The plane's process uses freed memory again."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

_PROGRAM = """
import gc, resource
import numpy as np
from penstock.server.daemon import settle_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    arrays = [np.ones(3 << 20, np.uint8) for _ in range(20)]  # as a step needs them, and then frees them
    del arrays
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

settle_memory()
faults()  # the first time they are new
print(faults(), gc.get_freeze_count())
"""


def test_freed_memory_is_used_again_and_what_is_loaded_is_not_looked_at_again() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    faults, frozen = map(int, done.stdout.split())
    assert faults < 2000, "the arrays had new pages"  # 15,000 without it
    assert frozen > 1000
