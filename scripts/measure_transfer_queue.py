"""Measure the TransferQueue backend beside TransferQueue's own in-memory one: same rows, same run, in turns.

    bash scripts/setup_integrations build/upstream
    unshare -rn bash -c 'ip link set lo up; build/upstream/env/bin/python scripts/measure_transfer_queue.py'

One Ray node, two storage units of SimpleStorage; Penstock has none. Every round starts a fresh queue, puts, gets, tags
and clears `ROWS` rows a few times and closes it. Shown is the fastest and the median of all rounds; what was put,
tagged or cleared with "Penstock" is on disk before the call returns.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

ROUNDS, REPEATS, ROWS, TOKENS = 3, 12, 64, 16_384
CALLS = ("put", "get", "tag", "clear")


def rows() -> Any:
    """What a step of rollouts looks like: ids, masks and log-probabilities of up to 16k tokens, and some text."""
    import torch
    from tensordict import TensorDict
    from tensordict.tensorclass import NonTensorStack

    maker = torch.Generator().manual_seed(0)
    lengths = torch.randint(TOKENS // 4, TOKENS, (ROWS,), generator=maker).tolist()

    def ragged(make: Any) -> Any:
        return torch.nested.as_nested_tensor([make(n) for n in lengths], layout=torch.jagged)

    columns = {
        "input_ids": ragged(lambda n: torch.randint(0, 150_000, (n,), generator=maker)),
        "position_ids": ragged(torch.arange),
        "response_mask": ragged(lambda n: torch.ones(n, dtype=torch.int64)),
        "rollout_log_probs": ragged(lambda n: torch.randn(n, generator=maker)),
        "uid": NonTensorStack(*[f"prompt-{i}" for i in range(ROWS)]),
    }
    return TensorDict(columns, batch_size=ROWS)


def measure(backend: dict[str, Any]) -> dict[str, list[float]]:
    import transfer_queue as tq
    from omegaconf import OmegaConf

    tq.init(OmegaConf.create({"backend": backend}))
    data, keys = rows(), [f"k{i}" for i in range(ROWS)]
    tags = [{"status": "finished"} for _ in keys]
    took: dict[str, list[float]] = {name: [] for name in CALLS}
    for number in range(REPEATS + 1):
        for name, work in (
            ("put", partial(tq.kv_batch_put, keys, "train", data)),
            ("get", partial(tq.kv_batch_get, keys, "train")),
            ("tag", partial(tq.kv_batch_put, keys, "train", None, tags)),
            ("clear", partial(tq.kv_clear, keys, "train")),
        ):
            before = time.perf_counter()
            work()
            if number:  # the first one opens connections
                took[name].append(time.perf_counter() - before)
    tq.close()
    return took


def main() -> None:
    import ray

    from penstock.integrations.transfer_queue.backend import register

    folder = Path(tempfile.mkdtemp(prefix="ps-"))
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80 << 20,
        _node_ip_address="127.0.0.1",
        _temp_dir=str(folder / "ray"),
        runtime_env={"worker_process_setup_hook": "penstock.integrations.transfer_queue.backend.register"},
    )
    register()
    found: dict[str, dict[str, list[float]]] = {}
    for number in range(ROUNDS):
        place = str(folder / f"queue-{number}")
        for name, backend in (
            ("SimpleStorage", {"SimpleStorage": {"num_data_storage_units": 2}}),
            ("Penstock", {"storage_backend": "Penstock", "Penstock": {"storage": place}}),
        ):
            for what, took in measure(backend).items():
                found.setdefault(name, {}).setdefault(what, []).extend(took)
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)
    size = sum(v.values().nbytes for v in rows().values() if hasattr(v, "values") and hasattr(v, "is_nested"))
    print(f"{ROWS} rows, {size / 1e6:.0f} MB; {ROUNDS} rounds of {REPEATS}; load {os.getloadavg()[0]:.1f}")
    print(f"{'':8}{'SimpleStorage':>24}{'Penstock':>24}{'ratio of medians':>20}")
    for what in CALLS:
        cells, middle = [], []
        for name in ("SimpleStorage", "Penstock"):
            took = found[name][what]
            middle.append(statistics.median(took))
            cells.append(f"{min(took) * 1e3:8.1f} .. {middle[-1] * 1e3:.1f} ms")
        print(f"{what:8}{cells[0]:>24}{cells[1]:>24}{middle[1] / middle[0]:>19.2f}x")


if __name__ == "__main__":
    main()
