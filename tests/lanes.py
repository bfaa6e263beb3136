"""Which tests are left out of `make test-fast`, and why: they start processes, or take seconds of core time.

Chosen by measurement (`pytest --durations=0`). A test that starts a process and is not listed fails in the fast lane;
one that became slow makes the fast lane slow, which is how it is noticed.
"""

from __future__ import annotations

PROCESS = {
    "bench/test_path.py",
    "bench/test_plane_benches.py",
    "demo/test_demo.py",
    "demo/test_memory.py",
    "demo/test_refusals.py",
    "demo/test_train_command.py",
    "serve/test_metrics.py",
    "serve/test_network.py",
    "serve/test_process.py",
    "serve/test_processes.py",
    "serve/test_watchdog.py",
    "test_cli.py",
    "test_command_errors.py",
    "test_commands_plane.py",
    "test_docs.py",
    "test_extras.py",
    "test_package.py",
    "test_security.py",
    "test_state_diagram.py",
    "train/test_ranks.py",
    "view/test_browser.py",
    "view/test_export_torture.py",
}
"""Modules, or single tests as MODULE::TEST, that start processes."""
DEEP: set[str] = set()
"""Modules and tests that take long in one process: simulations, searches, statistics, models."""
