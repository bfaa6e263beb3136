"""TransferQueue as a queue of prompts and of groups to score.

tasks: put prompts, take one, put its response, take rows that have both.
judge: put the rows of a group without rewards; a second writer takes them and puts the rewards; a consumer takes rows
that have everything.
judges: the second writer as many threads that share one client.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from .rivals import node
from .serving import Request, serve


@dataclass
class Times:
    """Seconds of each call, for each kind of round."""

    lease_s: list[float] = field(default_factory=list)
    """`get_meta` and `get_data` of one prompt."""
    put_s: list[float] = field(default_factory=list)
    """`put` of its response, or of the rows of a group."""
    score_s: list[float] = field(default_factory=list)
    """`get_meta` and `get_data` of a group, and `put` of its rewards."""
    read_s: list[float] = field(default_factory=list)
    """`get_meta` and `get_data` of a group that has everything."""
    group_s: list[float] = field(default_factory=list)
    """Seconds per group with many judges."""


def main() -> None:
    with node():
        import transfer_queue

        transfer_queue.init()
        serve(["queue"], {"TransferQueue": metadata.version("TransferQueue")}, run)


def run(request: Request) -> Times:
    import torch
    import transfer_queue

    torch.set_num_threads(1)
    client, count = transfer_queue.get_client(), int(request["count"])
    if request["kind"] == "tasks":
        found = _tasks(client, count)
    elif request["kind"] == "judge":
        found = _judge(client, count, int(request["samples"]))
    else:
        found = _judges(client, count, int(request["samples"]), int(request["judges"]))
    client.clear_partition("tasks")
    return found


def _rows(name: str, count: int, width: int = 32) -> Any:
    import torch
    from tensordict import TensorDict

    return TensorDict({name: torch.zeros(count, width, dtype=torch.long)}, batch_size=count)


def _tasks(client: Any, count: int) -> Times:
    found = Times()
    client.put(_rows("prompt", count), partition_id="tasks")
    for _ in range(count):
        began = time.perf_counter()
        meta = client.get_meta(["prompt"], 1, "tasks", task_name="generate")
        client.get_data(meta)
        leased = time.perf_counter()
        client.put(_rows("response", 1), metadata=meta)
        found.put_s.append(time.perf_counter() - leased)
        found.lease_s.append(leased - began)
    ready = client.get_meta(["prompt", "response"], count, "tasks", task_name="train")
    assert len(client.get_data(ready)) == count
    return found


def _judge(client: Any, count: int, samples: int) -> Times:
    found = Times()
    for _ in range(count):
        began = time.perf_counter()
        client.put(_rows("response", samples, 64), partition_id="tasks")
        put = time.perf_counter()
        _score(client, samples)
        scored = time.perf_counter()
        ready = client.get_meta(["response", "reward"], samples, "tasks", task_name="train")
        assert len(client.get_data(ready)) == samples
        found.read_s.append(time.perf_counter() - scored)
        found.score_s.append(scored - put)
        found.put_s.append(put - began)
    return found


def _judges(client: Any, count: int, samples: int, judges: int) -> Times:
    each = max(count // judges, 1)
    for _ in range(each * judges):
        client.put(_rows("response", samples, 64), partition_id="tasks")

    def work(_judge: int) -> list[float]:
        return [_score(client, samples) for _ in range(each)]

    with ThreadPoolExecutor(judges) as pool:
        began = time.perf_counter()
        scored = list(pool.map(work, range(judges)))
        seconds = time.perf_counter() - began
    return Times(score_s=[one for some in scored for one in some], group_s=[seconds / (each * judges)])


def _score(client: Any, samples: int) -> float:
    import torch
    from tensordict import TensorDict

    began = time.perf_counter()
    meta = client.get_meta(["response"], samples, "tasks", task_name="judge")
    assert len(client.get_data(meta)) == samples
    client.put(TensorDict({"reward": torch.zeros(samples, 1)}, batch_size=samples), metadata=meta)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
