"""The Ray object store handing a step over: one `put` per rank, one actor each that reads it."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from .rivals import node
from .serving import PATIENCE_S, Meter, Request, Round, serve


def main() -> None:
    import ray

    with node() as version:
        actor = ray.remote(num_cpus=0)
        actors: list[Any] = []

        def run(request: Request) -> Round:
            actors.extend(actor(_Reader).remote() for _ in range(len(actors), request["ranks"]))
            pids = ray.get([one.pid.remote() for one in actors], timeout=PATIENCE_S)
            size = request["num_bytes"] // request["ranks"] // 8
            arrays = [np.random.default_rng(rank).integers(0, 1 << 63, size) for rank in range(request["ranks"])]
            meter = Meter()
            asked = [one.read.remote(ray.put(array)) for one, array in zip(actors, arrays, strict=True)]
            got = ray.get(asked, timeout=PATIENCE_S)
            used = meter.read(ranks=pids)
            if got != [int(array.sum()) for array in arrays]:
                raise ValueError("other values arrived than were sent")
            return used

        serve(["store"], {"ray": version}, run)


class _Reader:
    def pid(self) -> int:
        return os.getpid()

    def read(self, array: Any) -> int:
        return int(array.sum())


if __name__ == "__main__":
    main()
