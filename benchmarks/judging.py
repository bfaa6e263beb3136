"""Late rewards in a plane of its own process: groups are put without rewards, judges lease and attach, a rank reads.

One judge: each group is put, leased, scored and read before the next one. Many judges: threads that share one client
score what was put before, each one group at a time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import penstock as ps
from penstock.client.api import open as open_plane
from penstock.server.plane_process import PlaneProcess

SAMPLES = 8
JUDGES = 8
Times = dict[str, list[float]]
"""What was timed -> seconds of each call."""


class Judging:
    """A plane whose groups wait for rewards, its judges and its rank."""

    def __init__(self, plane: ps.Plane, source: ps.Source) -> None:
        self._plane, self._source, self._number = plane, source, 0
        # Kept over all rounds: the first lease of a loop also finds out whether this process sees the storage.
        self._leases = [iter(plane.lacking("rewards", groups=1)) for _ in range(JUDGES)]

    def one(self, count: int) -> Times:
        """Put, score and read groups one after the other."""
        puts, scores, reads = [], [], []
        for _ in range(count):
            began = time.perf_counter()
            self._put()
            put = time.perf_counter()
            self._score(0)
            scored = time.perf_counter()
            self._read()
            reads.append(time.perf_counter() - scored)
            scores.append(scored - put)
            puts.append(put - began)
        return {"put_s": puts, "score_s": scores, "read_s": reads}

    def many(self, count: int) -> Times:
        """Score groups that were put before, with all judges at once."""
        each = max(count // JUDGES, 1)
        for _ in range(each * JUDGES):
            self._put()

        def work(judge: int) -> list[float]:
            return [self._score(judge) for _ in range(each)]

        with ThreadPoolExecutor(JUDGES) as pool:
            began = time.perf_counter()
            found = list(pool.map(work, range(JUDGES)))
            seconds = time.perf_counter() - began
        for _ in range(each * JUDGES):
            self._read()
        return {"score_s": [one for some in found for one in some], "group_s": [seconds / (each * JUDGES)]}

    def _put(self) -> None:
        self._number += 1
        turns = [ps.Turn(list(range(32))), ps.Turn(list(range(32)), logprobs=[-0.5] * 32)]
        with self._plane.group(f"p{self._number}", id=f"g{self._number}", policy_version=0, advantage="grpo") as group:
            for _ in range(SAMPLES):
                group.add(ps.Trajectory(turns=turns))

    def _score(self, judge: int) -> float:
        """Lease one group and attach its rewards. Returns the seconds that it took."""
        began = time.perf_counter()
        lease = next(self._leases[judge])
        result = lease.attach({sample.id: float(i % 2) for i, sample in enumerate(lease.samples)})
        took = time.perf_counter() - began
        assert result.new == SAMPLES, result
        return took

    def _read(self) -> None:
        step = self._source.step()
        assert sum(len(batch.segments.ids) for batch in step) == SAMPLES
        self._source.commit(step)


@contextmanager
def judging(folder: Path) -> Iterator[Judging]:
    """Start a plane in a process of its own, with its run in a folder on the disk."""
    words = [str(folder / "judged"), "--ranks=1", "--seq-len=512", "--groups-per-step=1", "--capacity=1000000"]
    late = ["--needs=rewards", "--set=needs_deadline_s=3600"]
    with (
        PlaneProcess([*words, *late, f"--listen=ipc://{folder}/j"]) as process,
        open_plane(process.url) as plane,
        ps.connect(process.url, rank=0, world=1, prefetch=0) as source,
    ):
        yield Judging(plane, source)
