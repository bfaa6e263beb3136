"""A plane that sees metadata and no frames: how many groups it accepts, and how it plans a step of a thousand ranks.

The engine and its log are the real ones; the frames are somewhere else. Runs as a program, `python -m
benchmarks.metadata_only FOLDER GROUPS RANKS`, so that the memory it reports is its own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence

import msgspec

from benchmarks.programs.inputs import CASES, SIZE, make_groups
from benchmarks.programs.plane import SEQ_LEN, samples_of
from benchmarks.programs.serving import peak_bytes
from penstock.frames import GroupMetadata, check_group, encode
from penstock.log import SqliteLog
from penstock.packing import Packing
from penstock.plane.engine import Drawn, Engine
from penstock.plane.intake import Incoming
from penstock.plane.settings import PlaneSettings, Target
from penstock.plane.step_builder import StepBuilder
from penstock.storage import MemoryStorage

_BYTES = 100_000
"""Of a frame."""
_PER_WRITE = 64
"""Groups accepted with one sync, as when many producers put at once."""


def make_metadata(count: int) -> list[GroupMetadata]:
    """Metadata of groups of 16 samples of up to 4,096 tokens; every eighth has the same lengths."""
    made = [
        check_group(encode(samples_of(group)), group=group.id, seq_len=SEQ_LEN)
        for group in make_groups(CASES["ragged"], range(8), "made")
    ]
    named = []
    for number in range(count):
        ids = tuple(f"g{number}/{i}" for i in range(SIZE))
        named.append(msgspec.structs.replace(made[number % 8], group=f"g{number}", ids=ids))
    return named


def measure(folder: str, groups: int, ranks: int) -> dict[str, float]:
    """Groups per second in the best quarter, seconds to plan a step of all of them, peak memory."""
    packing = Packing(ranks=ranks, seq_len=SEQ_LEN)
    settings = PlaneSettings(packing=packing, target=Target(groups=groups), max_held_bytes=1 << 50)
    metadata, storage = make_metadata(groups), MemoryStorage()
    log = SqliteLog(folder)
    engine = Engine(settings, log, storage)
    quarter = max(groups // 4, 1)
    rates = [_accept(engine, metadata[at : at + quarter]) for at in range(0, groups, quarter)]
    del metadata
    begin, begin_cpu = time.perf_counter(), time.process_time()
    drawn = engine.draw_step(1)
    assert isinstance(drawn, Drawn), drawn
    planned = StepBuilder(packing, storage).plan([GroupMetadata.from_bytes(data) for data in drawn.metadata])
    engine.record(drawn, planned)
    plan_s, cpu_s = time.perf_counter() - begin, time.process_time() - begin_cpu
    log.close()
    return {"groups_per_s": max(rates), "plan_s": plan_s, "cpu_s": cpu_s, "peak_bytes": peak_bytes(os.getpid())}


def _accept(engine: Engine, metadata: Sequence[GroupMetadata]) -> float:
    """Groups per second, durable, as writers put them that wrote their frames themselves."""
    (segment,) = engine.segments.register("bench")
    begin = time.perf_counter()
    for at in range(0, len(metadata), _PER_WRITE):
        for i, one in enumerate(metadata[at : at + _PER_WRITE], at):
            location = f"{segment}:{i * _BYTES}:{_BYTES}"
            engine.segments.expect(location, "bench")
            group = Incoming(
                id=one.group, digest=one.digests[0], size=_BYTES, tickets=[one.group], location=location, metadata=one
            )
            offered = engine.acceptance.offer(group)
            assert offered is True, offered
            engine.acceptance.arrive(group)
        assert all(outcome.error is None for outcome in engine.acceptance.flush())
    return len(metadata) / (time.perf_counter() - begin)


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
