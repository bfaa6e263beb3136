"""Settings for every test: one thread per process, properties that run the same examples every time, lanes, pace.

Lanes: `process` is a test that starts processes, `deep` one that takes more than a few seconds of core time, `slow` a
run with a model. `make test-fast` runs the rest.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

from penstock.testing.pace import pace as measured_pace

# Two cores are shared by the test workers; a second thread in each makes torch spin instead of work.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# `pytest --hypothesis-profile=explore` looks for new counterexamples; the default repeats the known examples.
settings.register_profile("repeat", deadline=None, derandomize=True, database=None)
settings.register_profile(
    "explore", deadline=None, max_examples=2000, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("repeat")


@pytest.fixture
def pace() -> float:
    """1.0 on an idle machine, more on a busy one; see `penstock.testing.pace`."""
    return measured_pace()
