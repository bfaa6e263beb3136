"""TransferQueue as a queue of prompts: put prompts, take one, put its response, take rows that have both."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from importlib import metadata

from .rivals import node
from .serving import Request, serve


@dataclass
class Times:
    lease_s: list[float] = field(default_factory=list)
    """`get_meta` and `get_data` of one prompt."""
    put_s: list[float] = field(default_factory=list)
    """`put` of its response."""
    train_s: float = 0.0
    """`get_meta` and `get_data` of all rows that have both."""


def main() -> None:
    with node():
        import transfer_queue

        transfer_queue.init()
        serve(["queue"], {"TransferQueue": metadata.version("TransferQueue")}, run)


def run(request: Request) -> Times:
    import torch
    import transfer_queue
    from tensordict import TensorDict

    torch.set_num_threads(1)
    client, count, found = transfer_queue.get_client(), int(request["count"]), Times()
    prompts = TensorDict({"prompt": torch.zeros(count, 32, dtype=torch.long)}, batch_size=count)
    client.put(prompts, partition_id="tasks")
    for _ in range(count):
        began = time.perf_counter()
        meta = client.get_meta(["prompt"], 1, "tasks", task_name="generate")
        client.get_data(meta)
        leased = time.perf_counter()
        response = TensorDict({"response": torch.zeros(1, 32, dtype=torch.long)}, batch_size=1)
        client.put(response, metadata=meta)
        found.put_s.append(time.perf_counter() - leased)
        found.lease_s.append(leased - began)
    began = time.perf_counter()
    ready = client.get_meta(["prompt", "response"], count, "tasks", task_name="train")
    assert len(client.get_data(ready)) == count
    found.train_s = time.perf_counter() - began
    client.clear_partition("tasks")
    return found


if __name__ == "__main__":
    main()
