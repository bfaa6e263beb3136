"""The Ray object store handing a step over: one `put` per rank, one actor that reads it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np


def hand_over(frames: Sequence[bytes], rounds: int) -> list[float]:
    """Seconds from the first `put` until every actor has read its frame, in each round."""
    import ray

    from penstock.bench.links import digest

    ray.init(num_cpus=len(frames), include_dashboard=False, log_to_driver=False)
    try:
        actors = [ray.remote(_Reader).remote() for _ in frames]
        arrays = [np.frombuffer(frame, np.uint8) for frame in frames]
        expected = [digest(frame) for frame in frames]
        times: list[float] = []
        for _ in range(rounds + 1):
            begin = time.perf_counter()
            asked = [actor.read.remote(ray.put(array)) for actor, array in zip(actors, arrays, strict=True)]
            got = ray.get(asked)
            times.append(time.perf_counter() - begin)
            assert got == expected
        return times[1:]
    finally:
        ray.shutdown()


class _Reader:
    def read(self, frame: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> bytes:
        from penstock.bench.links import digest

        return digest(frame.tobytes())
