"""Settings for every test: one thread per process, and properties that run the same examples every time."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Two cores are shared by the test workers; a second thread in each makes torch spin instead of work.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# `pytest --hypothesis-profile=explore` looks for new counterexamples; the default repeats the known examples.
settings.register_profile("repeat", deadline=None, derandomize=True, database=None)
settings.register_profile(
    "explore", deadline=None, max_examples=2000, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("repeat")
