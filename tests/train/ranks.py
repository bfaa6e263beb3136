"""For tests of trainer ranks: real processes that meet over gloo, each with what it found in a file."""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any

from tests.support.pace import pace

Body = Callable[..., Any]
CONTEXT = multiprocessing.get_context("forkserver")
# Imported once, in a process without threads from which the ranks are forked: each would need ten seconds for it.
CONTEXT.set_forkserver_preload(
    [
        "penstock.train.trainer",
        "penstock.integrations.trainers.transformers_trainer",
        "penstock.demo.tasks",
        "transformers.models.qwen3.modeling_qwen3",
        "transformers.models.qwen3_vl.modeling_qwen3_vl",
    ]
)


def run_ranks(body: Body, folder: Path, *args: Any, world: int = 2, timeout_s: float = 280.0) -> list[Any]:
    """Run `body(rank, note, *args)` in `world` processes; returns what each noted last, None where nothing.

    A rank that dies ends the others after ten seconds. One that hangs writes where it stands before it is killed.
    """
    port = meeting_port()
    ranks = [CONTEXT.Process(target=_rank, args=(body, rank, world, port, folder, args)) for rank in range(world)]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + timeout_s
    while running := [process for process in ranks if process.exitcode is None]:
        connection.wait([process.sentinel for process in running], max(deadline - time.monotonic(), 0.0))
        if any(process.exitcode for process in ranks):
            deadline = min(deadline, time.monotonic() + 10.0 * pace())
        if time.monotonic() >= deadline:
            break
    hung = [rank for rank, process in enumerate(ranks) if process.exitcode is None]
    codes = {rank: process.exitcode for rank, process in enumerate(ranks)}
    for rank in hung:
        _end(ranks[rank])
    stands = "".join(f"\nrank {rank}:\n{_stacks(folder, rank).read_text()}" for rank in hung)
    assert not hung, f"ranks {hung} still ran, exit codes {codes}{stands}"
    return [json.loads(path.read_text()) if path.exists() else None for path in _notes(folder, world)]


def _end(process: Any) -> None:
    """Let the rank write where it stands (see `_rank`), then kill it."""
    os.kill(process.pid, signal.SIGUSR1)
    process.join(2.0)
    process.kill()
    process.join()


def meeting_port() -> int:
    """The port of a new torch store that lives in this process: no rank has to bind one that may be taken by then."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    _stores.append(store)
    return int(store.port)


_stores: list[Any] = []  # they answer until this process ends


def meet_at(port: int) -> None:
    """Where the next `init_process_group` of this rank meets the others."""
    os.environ["MASTER_PORT"] = str(port)


def _notes(folder: Path, world: int) -> list[Path]:
    return [folder / f"rank-{rank}.json" for rank in range(world)]


def _stacks(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.stacks"


def _rank(body: Body, rank: int, world: int, port: int, folder: Path, args: tuple[Any, ...]) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": str(rank), "WORLD_SIZE": str(world)}
    meet_at(port)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store is in the test's process: every rank is a guest
    stacks = _stacks(folder, rank).open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    path = _notes(folder, world)[rank]
    body(rank, lambda found: path.write_text(json.dumps(found)), *args)
