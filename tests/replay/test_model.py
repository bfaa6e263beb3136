"""Random commands on a table, beside a plain list that knows what is allowed, over all parts and limits.

From the first checkpoint on a second table, restored from it, is given the same commands and must answer
identically: same samples, same probabilities, same evictions.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from penstock.errors import ConfigError, WaitTimeout
from penstock.replay import (
    Batch,
    Fifo,
    Freshest,
    Key,
    Lifo,
    MaxPriority,
    MinPriority,
    MinSize,
    Prioritized,
    Queue,
    Reason,
    SamplesPerInsert,
    Selector,
    Table,
    Uniform,
    prioritized,
)
from tests.support.reference_table import Held, ReferenceTable

pytestmark = pytest.mark.deep

SAMPLERS: list[Selector] = [
    Fifo(),
    Lifo(),
    Uniform(),
    Prioritized(0.6),
    Prioritized(1.0),
    MinPriority(),
    MaxPriority(),
    Freshest(),
    Freshest(1),
]
LIMITERS = ("MinSize", "Queue", "SamplesPerInsert")
PRIORITIES = st.sampled_from([0.0, 0.0, 1e-9, 0.5, 1.0, 2.0, 1e9])
KEYS = st.one_of(st.integers(0, 11), st.sampled_from(["a", "b", "c", "d"]))
SIZES = st.integers(0, 12)
BATCH = 3


@st.composite
def table_settings(draw: st.DrawFn, sampler: Selector, limiter: str) -> dict[str, Any]:
    capacity = draw(st.integers(BATCH, 8))
    uses = draw(st.sampled_from([1, 2, 3] if limiter == "Queue" else [None, None, 1, 2]))
    removers = st.sampled_from(SAMPLERS)
    remover = draw(removers if uses is None else st.one_of(st.none(), removers))
    ratio = float(uses) if uses is not None and remover is None else draw(st.sampled_from([0.5, 1.0]))
    rules = {
        "MinSize": MinSize(draw(st.integers(1, BATCH))),
        "Queue": Queue(draw(st.integers(BATCH, capacity))),
        "SamplesPerInsert": SamplesPerInsert(ratio, BATCH, 8.0 + 3 * ratio, BATCH),
    }
    return {
        "capacity": capacity,
        "capacity_bytes": draw(st.sampled_from([None, 30])),
        "capacity_tokens": draw(st.sampled_from([None, 40])),
        "sampler": sampler,
        "remover": remover,
        "limiter": rules[limiter],
        "max_times_sampled": uses,
        "max_staleness": draw(st.sampled_from([None, None, 1, 2])),
        "seed": draw(st.integers(0, 3)),
    }


class TableMachine(RuleBasedStateMachine):
    sampler: Selector
    limiter: str
    seen: Counter[str]
    """What happened over all runs: a machine that is always held back would agree with anything."""

    def __init__(self) -> None:
        super().__init__()
        self.evictions: list[tuple[Key, Reason]] = []
        self.twin_evictions: list[tuple[Key, Reason]] = []
        self.twin: Table | None = None
        self.handles: dict[int, Held] = {}
        self.stale_updates = 0
        self.folder = tempfile.TemporaryDirectory()

    def teardown(self) -> None:
        self.folder.cleanup()

    @initialize(data=st.data())
    def build(self, data: st.DataObject) -> None:
        config = data.draw(table_settings(self.sampler, self.limiter))
        self.table = Table(**config, on_evict=lambda key, reason: self.evictions.append((key, reason)))
        self.model = ReferenceTable(self.table.settings)

    def both(self, call: Callable[[Table], Any]) -> Any:
        """Call the table, and its twin if there is one; they must answer alike."""
        self.evictions.clear()
        self.twin_evictions.clear()
        answer = outcome(call, self.table)
        if self.twin is not None:
            assert comparable(outcome(call, self.twin)) == comparable(answer)
            assert self.twin_evictions == self.evictions
        return answer

    @rule(key=KEYS, priority=PRIORITIES, num_bytes=SIZES, num_tokens=SIZES, behind=st.integers(-1, 3))
    def insert(self, key: Key, priority: float, num_bytes: int, num_tokens: int, behind: int) -> None:
        self._insert(key, priority, num_bytes, num_tokens, behind)

    def _insert(self, key: Key, priority: float, num_bytes: int, num_tokens: int, behind: int) -> None:
        version = max(0, self.model.version - behind)
        item = f"{key}/{self.model.inserted}".encode()
        answer = self.both(
            lambda table: table.insert(
                key,
                item,
                priority=priority,
                num_bytes=num_bytes,
                num_tokens=num_tokens,
                policy_version=version,
                timeout=0,
            )
        )
        if self.model.is_stale(version):
            assert answer is None
            self.model.refused_stale += 1
        elif not self.model.may_insert(key, num_bytes, num_tokens):
            assert isinstance(answer, WaitTimeout | ConfigError)
            assert not self.evictions
        else:
            assert isinstance(answer, int) and answer not in self.handles
            held = Held(
                key=key,
                item=item,
                priority=priority,
                version=version,
                num_bytes=num_bytes,
                num_tokens=num_tokens,
                arrival=0,
            )
            self.model.insert(held, [key for key, reason in self.evictions if reason == "overflow"])
            self.handles[answer] = held
            self.seen["inserted"] += 1
            self.seen.update(reason for _, reason in self.evictions)

    @rule(
        priorities=st.lists(PRIORITIES, min_size=BATCH, max_size=BATCH),
        counts=st.lists(st.integers(1, BATCH), min_size=2, max_size=4),
        replace=st.booleans(),
    )
    def insert_and_sample(self, priorities: list[float], counts: list[int], replace: bool) -> None:
        """Commands drawn one by one seldom meet a table that may be sampled."""
        for number, priority in enumerate(priorities):
            self._insert(f"more {number}", priority, number, number, 0)
        for count in counts:
            self._sample(count, replace)

    @rule(count=st.integers(1, BATCH), replace=st.booleans())
    def sample(self, count: int, replace: bool) -> None:
        self._sample(count, replace)

    def _sample(self, count: int, replace: bool) -> None:
        replace = replace and self.table.settings.max_times_sampled is None
        answer = self.both(lambda table: table.sample(count, replace=replace, timeout=0))
        if not self.model.may_sample(count, replace=replace):
            assert isinstance(answer, WaitTimeout)
            return
        assert isinstance(answer, Batch) and len(answer) == count
        expected = [self.model.find(key) for key in answer.keys.tolist()]
        assert [held and held.item for held in expected] == [bytes(item) for item in answer.items]
        assert [held and held.times for held in expected] == answer.times_sampled.tolist()
        assert [held and held.version for held in expected] == answer.policy_versions.tolist()
        assert ((answer.weights > 0) & (answer.weights <= 1)).all()
        self.seen["sampled"] += 1
        self.seen["repeated"] += len(set(answer.keys.tolist())) < count
        self.seen["twin sampled"] += self.twin is not None
        self.model.sample(answer.keys.tolist(), replace=replace)
        gone = [self.model.find(key) is None for key in answer.keys.tolist()]
        assert answer.last_use.tolist() == gone

    @rule(updates=st.dictionaries(KEYS, PRIORITIES, max_size=5))
    def update_by_key(self, updates: dict[Key, float]) -> None:
        applied = self.both(lambda table: table.update_priorities(updates))
        held = [(self.model.find(key), priority) for key, priority in updates.items()]
        for one, priority in held:
            if one is not None:
                one.priority = priority
        assert applied == sum(one is not None for one, _ in held)
        self.stale_updates += len(updates) - applied

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def update_by_handle(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.handles)), max_size=6))
        priorities = data.draw(st.lists(PRIORITIES, min_size=len(chosen), max_size=len(chosen)))
        applied = self.both(lambda table: table.update_handles(np.array(chosen, dtype=np.int64), priorities))
        num_held = 0
        for handle, priority in zip(chosen, priorities, strict=True):
            if any(self.handles[handle] is held for held in self.model.held):
                self.handles[handle].priority = priority
                num_held += 1
        assert applied == num_held
        self.stale_updates += len(chosen) - num_held

    @rule(by=st.integers(0, 2))
    def advance(self, by: int) -> None:
        before = len(self.model.held)
        self.model.advance(self.model.version + by)
        assert self.both(lambda table: table.advance(self.model.version)) == before - len(self.model.held)

    @rule(keys=st.lists(KEYS, max_size=4))
    def remove(self, keys: list[Key]) -> None:
        before = len(self.model.held)
        self.model.remove(keys, "removed")
        assert self.both(lambda table: table.remove(keys)) == before - len(self.model.held)

    @rule(really=st.integers(0, 9))
    def clear(self, really: int) -> None:
        if really != 7:
            return
        assert self.both(lambda table: table.clear()) == len(self.model.held)
        self.model.remove([held.key for held in self.model.held], "cleared")

    @rule()
    def checkpoint_and_restore(self) -> None:
        path = Path(self.folder.name) / "table"
        self.table.checkpoint(path)
        self.twin = Table.restore(
            path, load=bytes, on_evict=lambda key, reason: self.twin_evictions.append((key, reason))
        )

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "table"):
            return
        held = self.model.held
        assert self.table.keys() == [one.key for one in held]
        assert len(self.table) == len(held)
        counts = self.table.metrics()
        assert counts["buffer/bytes"] == sum(one.num_bytes for one in held)
        assert counts["buffer/tokens"] == sum(one.num_tokens for one in held)
        assert counts["buffer/times_sampled_max"] == max((one.times for one in held), default=0)
        assert counts["gen/refused_stale"] == self.model.refused_stale
        assert counts["train/items"] == self.model.sampled
        assert counts["train/priority_updates_stale"] == self.stale_updates
        assert counts["buffer/evicted_unsampled"] == self.model.evicted_unsampled
        evicted = {name.rsplit("/")[-1]: n for name, n in counts.items() if name.startswith("buffer/evicted/")}
        assert {reason: n for reason, n in evicted.items() if n} == dict(+self.model.evicted)
        assert counts["gen/items"] == self.model.inserted == len(held) + sum(evicted.values())
        if self.twin is not None:
            assert counts == {**self.twin.metrics(), **{n: counts[n] for n in counts if n.endswith("wait_s")}}


def outcome(call: Callable[[Table], Any], table: Table) -> Any:
    try:
        return call(table)
    except (WaitTimeout, ConfigError) as error:
        return error


def comparable(answer: Any) -> Any:
    if isinstance(answer, Batch):
        arrays = (answer.handles, answer.rows, answer.probabilities, answer.inclusion, answer.last_use)
        return (answer.keys.tolist(), [bytes(i) for i in answer.items], *(array.tolist() for array in arrays))
    return type(answer) if isinstance(answer, Exception) else answer


@pytest.mark.parametrize("limiter", LIMITERS)
@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_table_agrees_with_the_list(sampler: Selector, limiter: str) -> None:
    run_machine(sampler, limiter, max_examples=12)


@pytest.mark.parametrize("limiter", LIMITERS)
def test_table_agrees_with_the_list_when_the_tree_draws(limiter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables as small as these would otherwise never need the tree."""
    monkeypatch.setattr(prioritized, "_MAX_PROPOSALS", 0.0)
    run_machine(Prioritized(0.6), limiter, max_examples=12)


def run_machine(sampler: Selector, limiter: str, max_examples: int) -> None:
    seen: Counter[str] = Counter()
    members = {"sampler": sampler, "limiter": limiter, "seen": seen}
    machine = type("Machine", (TableMachine,), members)
    run_state_machine_as_test(
        machine, settings=settings(max_examples=max_examples, stateful_step_count=40, deadline=None)
    )
    assert seen["inserted"] >= 100, seen
    assert seen["sampled"] >= 30, seen
    assert seen["twin sampled"] >= 5, seen
    # A queue counts uses, so it has no replacement; and who takes items in order repeats only when it has run
    # out of them, which SamplesPerInsert's min_size of a whole batch rules out.
    in_order = isinstance(sampler, Fifo | Lifo | MinPriority | MaxPriority)
    if limiter == "MinSize" or (limiter == "SamplesPerInsert" and not in_order):
        assert seen["repeated"] >= 1, seen
