"""What a message costs the plane does not depend on how many ranks there are."""

from __future__ import annotations

import time

from benchmarks.protocol import protocol_time
from penstock.protocol.message_header import pack_message, read_from_client
from penstock.protocol.messages import Beat

_REFERENCE_S = 0.0035
"""What `_pace` measures on the machine for which the target was set, when it has nothing else to do."""


def _pace() -> float:
    """How much slower this machine is just now, in CPU time: caches and cores are shared."""

    def once() -> float:
        began = time.thread_time()
        for number in range(5000):
            read_from_client(pack_message(Beat(session=1, number=number, heard=number)))
        return time.thread_time() - began

    return max(1.0, min(once() for _ in range(3)) / _REFERENCE_S)


def test_a_step_of_1024_ranks_costs_the_plane_at_most_25_ms() -> None:
    assert protocol_time(1024, steps=4, clock=time.thread_time) <= 0.025 * _pace()


def test_a_rank_costs_the_same_among_many_as_among_few() -> None:
    few, many = (protocol_time(ranks, clock=time.thread_time) / ranks for ranks in (128, 1024))
    assert many <= 2 * few
