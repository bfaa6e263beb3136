"""A pytest plugin that runs TransferQueue's own end-to-end tests with the backend "Penstock", or with TransferQueue's.

    git clone https://github.com/Ascend/TransferQueue
    export TQ_TEST_BACKEND=Penstock
    bash scripts/test_integrations build/upstream -c /dev/null -p tests.upstream.their_tests TransferQueue/tests/e2e

Their tests are not changed: the plugin adds a config, and starts Ray on loopback with the backend registered.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import pytest
import ray
from omegaconf import OmegaConf

from penstock.integrations.transfer_queue.backend import register

_HOOK = "penstock.integrations.transfer_queue.backend.register"
_RAY: dict[str, Any] = {
    "num_cpus": 4,
    "include_dashboard": False,
    "log_to_driver": False,
    "object_store_memory": 80 << 20,
    "_node_ip_address": "127.0.0.1",
    "_temp_dir": f"/tmp/ps-{os.getpid()}",
    "runtime_env": {"worker_process_setup_hook": _HOOK},
}


def pytest_configure() -> None:
    register()
    plain = ray.init
    ray.init = lambda **theirs: plain(**{**theirs, **_RAY})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("TQ_TEST_BACKEND") != "Penstock":
        return
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        settings = {"storage": tempfile.mkdtemp(prefix="ps-queue-")}
        backend = {"storage_backend": "Penstock", "Penstock": settings}
        config = OmegaConf.create({"controller": {"polling_mode": True}, "backend": backend})
        if hasattr(module, "BACKEND_CONFIGS"):
            module.BACKEND_CONFIGS["Penstock"] = config
        else:
            module._TQ_CONFIG = config
