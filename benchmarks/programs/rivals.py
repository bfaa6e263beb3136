"""Bare Ray references, and TransferQueue: the same arrays, producers and ranks as Ray actors on one node.

refs: each producer puts a group's arrays into the object store, the driver hands the references to the ranks, group
i to rank i modulo ranks. No plan, no disk, no check.

queue: TransferQueue with SimpleStorage in two units. Producers call `kv_batch_put` per group; when all have, the driver
calls `kv_list` and hands each rank its keys, the ranks call `kv_batch_get`, as verl's trainer does. No disk.

whole: the same, with one `kv_batch_put` per producer of all its groups. Where all samples have one length, they lie in
one array before the clock starts.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata, util
from typing import Any

from .inputs import CASES, Group, add, make_groups, read_all, sums_of
from .serving import PATIENCE_S, Meter, Request, Round, check, serve

PRODUCERS = 2
_STORE_BYTES = 3 << 30


def main() -> None:
    with node() as version:
        offers, versions = ["refs"], {"ray": version}
        if util.find_spec("transfer_queue") is not None:
            import transfer_queue

            transfer_queue.init()
            offers, versions = (
                [*offers, "queue", "whole"],
                versions | {"TransferQueue": metadata.version("TransferQueue")},
            )
        system = _System(with_queue="queue" in offers)
        serve(offers, versions, system.run)


@contextmanager
def node() -> Iterator[str]:
    """A Ray node that only this host can reach, and its version; its files go with it."""
    import ray

    # Ray puts sockets there, whose paths may not be longer than 107 characters.
    with tempfile.TemporaryDirectory(prefix="ps-", dir=sys.argv[1], ignore_cleanup_errors=True) as folder:
        ray.init(
            num_cpus=8,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=_STORE_BYTES,
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
        )
        try:
            yield ray.__version__
        finally:
            ray.shutdown()


class _System:
    def __init__(self, *, with_queue: bool) -> None:
        import ray

        actor = ray.remote(num_cpus=0)
        self._producers = [actor(_Producer).remote(number) for number in range(PRODUCERS)]
        self._ranks = [actor(_Rank).remote() for _ in range(int(sys.argv[2]))]
        everybody = [*self._producers, *self._ranks]
        self._pids = ray.get([one.start.remote(with_queue) for one in everybody], timeout=PATIENCE_S)

    def run(self, request: Request) -> Round:
        import ray

        ranks, case = int(request["ranks"]), CASES[request["case"]]
        partition = f"{case.name}-{ranks}-{request['system']}-{request['round']}"
        whole = request["system"] == "whole"
        sent = ray.get([one.prepare.remote(case.name, partition, whole) for one in self._producers], timeout=PATIENCE_S)
        meter = Meter()
        take = self._refs if request["system"] == "refs" else self._queue
        got = take(ranks, partition)
        producers, pids = self._pids[:PRODUCERS], self._pids[PRODUCERS:]
        used = meter.read(ranks=pids[:ranks], producers=producers, idle=pids[ranks:])
        if request["system"] != "refs":
            _clear(partition)
        check(sent, got)
        return used

    def _refs(self, ranks: int, _partition: str) -> list[dict[str, int]]:
        import ray

        put = ray.get([one.put_refs.remote() for one in self._producers], timeout=PATIENCE_S)
        found = [ref for refs in zip(*put, strict=True) for ref in refs]
        taken = [one.take_refs.remote(found[rank::ranks]) for rank, one in enumerate(self._ranks[:ranks])]
        sums: list[dict[str, int]] = ray.get(taken, timeout=PATIENCE_S)
        return sums

    def _queue(self, ranks: int, partition: str) -> list[dict[str, int]]:
        import ray
        import transfer_queue

        ray.get([one.put_queue.remote(partition) for one in self._producers], timeout=PATIENCE_S)
        keys = sorted(transfer_queue.kv_list(partition)[partition])
        taken = [one.take_queue.remote(keys[rank::ranks], partition) for rank, one in enumerate(self._ranks[:ranks])]
        sums: list[dict[str, int]] = ray.get(taken, timeout=PATIENCE_S)
        return sums


def _clear(partition: str) -> None:
    import transfer_queue

    transfer_queue.kv_clear(list(transfer_queue.kv_list(partition)[partition]), partition)


class _Actor:
    def start(self, with_queue: bool) -> int:
        import torch

        torch.set_num_threads(1)
        if with_queue:
            import transfer_queue

            transfer_queue.init()
        return os.getpid()


class _Producer(_Actor):
    def __init__(self, number: int) -> None:
        self._number = number
        self._groups: list[Group] = []

    def prepare(self, name: str, partition: str, whole: bool) -> dict[str, int]:
        case = CASES[name]
        self._groups = make_groups(case, range(self._number, case.groups, PRODUCERS), partition)
        sums = sums_of(self._groups)
        if whole:
            self._groups = [_joined(self._groups)]
        return sums

    def put_refs(self) -> list[Any]:
        import ray

        return [ray.put(group.block or group.columns) for group in self._groups]

    def put_queue(self, partition: str) -> None:
        import transfer_queue

        for group in self._groups:
            fields = _fields(group)
            keys = [f"{group.id}/{i}" for i in range(len(fields))]
            transfer_queue.kv_batch_put(keys=keys, partition_id=partition, fields=fields)


def _joined(groups: list[Group]) -> Group:
    """All groups as one: their rows, and one array per column where they have one."""
    import numpy as np

    first, blocks = groups[0], [group.block for group in groups if group.block is not None]
    rows = {name: [row for group in groups for row in group.columns[name]] for name in first.columns}
    joined = {name: np.concatenate([block[name] for block in blocks]) for name in (blocks[0] if blocks else ())}
    return Group(id=first.id, columns=rows, block=joined or None)


def _fields(group: Group) -> Any:
    """The group as TransferQueue takes it: a tensor per column, or a jagged one where lengths differ."""
    import numpy as np
    import torch
    from tensordict import TensorDict

    def tensor(values: Any) -> Any:
        return torch.from_numpy(values.view(np.int32) if values.dtype == np.uint32 else values)

    def column(rows: list[Any]) -> Any:
        return torch.nested.as_nested_tensor([tensor(row) for row in rows], layout=torch.jagged)

    size = len(group.columns["token_ids"])
    if group.block is not None:
        return TensorDict({name: tensor(values) for name, values in group.block.items()}, batch_size=size)
    return TensorDict({name: column(rows) for name, rows in group.columns.items()}, batch_size=size)


class _Rank(_Actor):
    def take_refs(self, refs: list[Any]) -> dict[str, int]:
        import numpy as np
        import ray
        import torch

        sums = []
        for columns in ray.get(refs, timeout=PATIENCE_S):
            lists = {name: values if isinstance(values, list) else [values] for name, values in columns.items()}
            lists["token_ids"] = [values.astype(np.int64) for values in lists["token_ids"]]
            for name, rows in lists.items():
                sums += [read_all({name: torch.from_numpy(row).numpy()}) for row in rows]
        return add(sums)

    def take_queue(self, keys: list[str], partition: str) -> dict[str, int]:
        import torch
        import transfer_queue

        found = transfer_queue.kv_batch_get(keys, partition)
        sums = []
        for name in found.keys():  # noqa: SIM118 - a TensorDict, whose iteration is over its batch
            tensor = found[name]
            values = tensor.values() if tensor.is_nested else tensor
            values = values.to(torch.int64) if name == "token_ids" else values
            sums.append(read_all({name: values.numpy()}))
        return add(sums)


if __name__ == "__main__":
    main()
