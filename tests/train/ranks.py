"""For tests of trainer ranks: real processes that meet over gloo, each with what it found in a file."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Body = Callable[..., Any]
CONTEXT = multiprocessing.get_context("forkserver")
# Imported once, in a process without threads from which the ranks are forked: each would need ten seconds for it.
CONTEXT.set_forkserver_preload(
    [
        "penstock.train.trainer",
        "penstock.integrations.transformers_trainer",
        "penstock.demo.color",
        "transformers.models.qwen3.modeling_qwen3",
        "transformers.models.qwen3_vl.modeling_qwen3_vl",
    ]
)


def run_ranks(body: Body, folder: Path, *args: Any, world: int = 2, timeout_s: float = 280.0) -> list[Any]:
    """Run `body(rank, note, *args)` in `world` processes; returns what each noted last, None where nothing."""
    port = free_port()
    ranks = [CONTEXT.Process(target=_rank, args=(body, rank, world, port, folder, args)) for rank in range(world)]
    deadline = time.monotonic() + timeout_s
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(max(deadline - time.monotonic(), 0.1))
    hung = [process for process in ranks if process.is_alive()]
    for process in hung:
        process.kill()
        process.join()
    assert not hung, f"{len(hung)} ranks still ran after {timeout_s:g} s"
    return [json.loads(path.read_text()) if path.exists() else None for path in _notes(folder, world)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def meet_at(port: int) -> None:
    """Where the next `init_process_group` of this rank meets the others."""
    os.environ["MASTER_PORT"] = str(port)


def _notes(folder: Path, world: int) -> list[Path]:
    return [folder / f"rank-{rank}.json" for rank in range(world)]


def _rank(body: Body, rank: int, world: int, port: int, folder: Path, args: tuple[Any, ...]) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": str(rank), "WORLD_SIZE": str(world)}
    meet_at(port)
    path = _notes(folder, world)[rank]
    body(rank, lambda found: path.write_text(json.dumps(found)), *args)
