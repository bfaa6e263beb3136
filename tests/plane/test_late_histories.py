"""Random histories with late rewards: memory always follows from the log, the ledger balances, a rerun agrees."""

from __future__ import annotations

import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash

from penstock.frames import encode
from penstock.log import Awaited, GroupRow, HandOut, ReturnLeases, SqliteLog
from penstock.packing import Packing
from penstock.plane.column_leases import ColumnLeases
from penstock.plane.damage import look_at_frame
from penstock.plane.effect_runner import admission_of
from penstock.plane.late_groups import COLUMN, LateGroups, WaitingGroup, key_of
from penstock.plane.late_values import MOST_RESTARTS
from penstock.plane.lease_book import LeaseBook
from penstock.plane.leases import Leases
from penstock.plane.settings import PlaneSettings, Replay, Target
from penstock.plane.workers import Inline
from penstock.protocol import AttachValues, LeaseColumns, Pulse, Send
from penstock.runs import RecordedRun, rerun
from tests.support.engines import DirectEngine
from tests.support.groups import named_group

REPLAYS = {
    "queue": Replay(capacity=12),
    "stale": Replay(capacity=12, max_staleness=2, seed=3),
    "reuse": Replay(capacity=12, max_times_sampled=2, seed=4),
}


TOKENS = ("teacher_logprobs",)


class History:
    """A plane that lives through random decisions."""

    def __init__(self, folder: Path, seed: int, *, tokens: tuple[str, ...] = (), **settings: Any) -> None:
        """`tokens` are columns with values per token that come late."""
        self._folder, self._settings, self._tokens = folder, settings, tokens
        self._rng = np.random.default_rng(seed)
        self._names: list[str] = []
        self._now = 0.0
        self.engine = self._open()

    def _open(self) -> DirectEngine:
        made = PlaneSettings(
            packing=Packing(ranks=2, seq_len=64),
            target=Target(groups=2),
            needs=("rewards", *self._tokens),
            needs_deadline_s=10.0,
            retain="all",
            **self._settings,
        )
        return DirectEngine(made, SqliteLog(self._folder))

    def live(self, turns: int) -> None:
        acts = [self._put, self._put, self._put, self._attach, self._attach, self._attach, self._step, self._step]
        acts += [self._attach_tokens] * (6 * len(self._tokens))
        for _ in range(turns):
            self._rng.choice(np.array([*acts, self._lease, self._wait, self._restart], object))()
            assert self.engine.ledger.balanced, self.engine.ledger
            self._check_memory()

    def _put(self) -> None:
        name = f"g{len(self._names)}"
        version = max(self.engine.policy_version - int(self._rng.integers(4)), 0)
        samples = named_group(name, policy_version=version, samples=int(self._rng.integers(1, 4)))
        mode = "opd" if self._tokens and self._rng.random() < 0.5 else "rl"
        samples = [sample.replace(mode=mode) for sample in samples]
        is_late = self._rng.random() < 0.8
        if is_late:
            samples = [sample.replace(rewards=None, advantages=None) for sample in samples]
        frame = encode(samples)
        filters = ("zero_variance",) if self._rng.random() < 0.5 else ()
        found = self.engine.pipeline.put(
            name,
            name,
            xxhash.xxh3_128_digest(frame),
            frame,
            advantage="leave_one_out" if is_late else "",
            filters=filters,
            priority=float(self._rng.choice([1.0, 0.5])),
        )
        self.engine.pipeline.begin()
        self.engine._workers.finish()
        refused = self.engine.pipeline.refused()
        if found is None and not refused:
            assert all(outcome.error is None for outcome in self.engine.flush())
            self._names.append(name)

    def _attach(self) -> None:
        if not self._names:
            return
        name = str(self._rng.choice(self._names[-12:]))
        row = self.engine.state.rows.get(self.engine.state.by_id.get(name, 0))
        values: dict[str, float] = {}
        errors: dict[str, str] = {}
        for i in range(3 if row is None else row.samples):
            if self._rng.random() < 0.2:
                continue
            sample = f"{name}/{i}"
            if self._rng.random() < 0.1:
                errors[sample] = "judge failed"
            else:
                values[sample] = float(self._rng.integers(3))
        message = AttachValues(ticket=1, column="rewards", values={name: values}, errors={name: errors})
        self.engine.late.offer("t", message)
        self.engine.late.flush()  # unknown samples and other values than before are errors, and change nothing

    def _attach_tokens(self) -> None:
        """Attach values per token to a part of a group: some are known, some conflict, some come too late."""
        waiting = [self.engine.state.rows[op].id for op in self.engine.state.late.waiting]
        names = [*waiting, *self._names[-3:]]
        name = str(self._rng.choice(names)) if names else ""
        row = self.engine.state.rows.get(self.engine.state.by_id.get(name, 0))
        if row is None:
            return
        before, column = row.location, str(self._rng.choice(self._tokens))
        chosen = [f"{name}/{i}" for i in range(row.samples) if self._rng.random() < 0.8]
        other = -1.0 if self._rng.random() < 0.1 else 0.0
        found = self.engine.attach(
            column, {name: {one: np.linspace(0, other - 1.0, 6) for one in chosen}} if chosen else {}
        )
        after = self.engine.state.rows[row.op].location if row.op in self.engine.state.rows else ""
        assert after in ("", before) or found.new, found

    def _lease(self) -> None:
        free = list(self.engine.state.late.free.get("rewards", {}))
        numbers = list(self.engine.state.leases.open)
        if numbers and self._rng.random() < 0.5:
            self.engine.recorder.decide_all([ReturnLeases(leases=(int(self._rng.choice(numbers)),))])
        elif free:
            keys = tuple(key_of(op, "rewards") for op in free[:2])
            self.engine.recorder.decide_all([HandOut(kind=COLUMN, keys=keys, worker="w", lease_s=30.0)])

    def _step(self) -> None:
        if not isinstance(self.engine.plan_step(self.engine.last_step + 1), str):
            self.engine.commit(self.engine.last_step, self.engine.policy_version + int(self._rng.integers(2)))

    def _wait(self) -> None:
        self._now += float(self._rng.integers(8))
        self.engine.late.tick(self._now)

    def _restart(self) -> None:
        before = self.engine.ledger.as_dict()
        self.close()
        self.engine = self._open()
        self._now = 0.0
        assert self.engine.ledger.as_dict() == before

    def _check_memory(self) -> None:
        """What memory holds is what a restart would make of the log."""
        if self._rng.random() < 0.3:
            live = self.engine.state
            self.engine.recorder.rebuild()
            again = self.engine.state
            assert again.ledger.as_dict() == live.ledger.as_dict()
            assert again.late.waiting == live.late.waiting
            assert again.bias.metrics() == pytest.approx(live.bias.metrics())
            assert {c: set(ops) for c, ops in again.late.free.items() if ops} == {
                c: set(ops) for c, ops in live.late.free.items() if ops
            }
            assert +again.late.tables == +live.late.tables
            assert +again.bytes_of == +live.bytes_of
            assert again.leases.open == live.leases.open
            assert {op: row.location for op, row in again.rows.items()} == {
                op: row.location for op, row in live.rows.items()
            }
            assert {op: row.kinds for op, row in again.rows.items() if op not in again.late.waiting} == {
                op: row.kinds for op, row in live.rows.items() if op not in live.late.waiting
            }

    def close(self) -> None:
        self.engine.close()
        self.engine.log.close()


@pytest.mark.parametrize("name", REPLAYS)
@pytest.mark.parametrize(
    ("seed", "on_missing", "tokens"),
    [
        (1, "drop", ()),
        *(pytest.param(*given, marks=pytest.mark.deep) for given in ((2, "train", ()), (5, "train", TOKENS))),
    ],
)
def test_memory_follows_from_the_log_and_a_rerun_agrees(
    tmp_path: Path, name: str, seed: int, on_missing: str, tokens: tuple[str, ...]
) -> None:
    history = History(
        tmp_path / "run",
        seed,
        tokens=tokens,
        replay=REPLAYS[name],
        on_missing=on_missing,
        snapshot_every=int(10 ** (seed % 3)),
    )
    history.live(240 if tokens else 120)
    counts, steps = history.engine.state, history.engine.next_step - 1
    assert counts.ledger.dropped.total() + counts.ledger.waiting > 0
    assert steps > 2
    history.close()
    found = rerun(RecordedRun.open(tmp_path / "run"), tmp_path / "again")
    assert found.same, found.sentence
    assert (found.steps, found.skipped) == (steps, 0)


def test_a_snapshot_in_which_every_waiting_group_is_leased() -> None:
    """Its column is in no list of free groups then, and a group leaves all the same."""
    leases = LeaseBook()
    leases.begin(2, HandOut(kind=COLUMN, keys=(key_of(1, "rewards"),), worker="w", lease_s=1.0), 0)
    row = GroupRow(op=1, id="g", digest=b"", policy_version=0, samples=2, tokens=4, size=9)
    waiting = WaitingGroup(awaited=Awaited(columns={"rewards": (0, 1)}))
    late = LateGroups(leases)
    late.restore({1: waiting}, {1: row})
    assert late.remove(row) is waiting
    assert not leases.open


@pytest.mark.parametrize("others", [0, 1])
def test_a_group_gets_its_time_again_after_three_restarts_and_not_for_ever(tmp_path: Path, others: int) -> None:
    """Also behind groups of a version that did not note the epoch of the put."""
    deadline_s = 0.5
    settings = PlaneSettings(
        packing=Packing(ranks=1, seq_len=64), target=Target(groups=1), needs=("rewards",), needs_deadline_s=deadline_s
    )
    engine = DirectEngine(settings, SqliteLog(tmp_path))
    samples = [sample.replace(rewards=None, advantages=None) for sample in named_group("g")]
    for name in [*(f"other {i}" for i in range(others)), "g"]:
        frame = encode([sample.replace(id=f"{name}/{i}", group=name) for i, sample in enumerate(samples)])
        assert engine.put(name, name, frame) is None and not engine.flush()[0].error
    put = time.time()
    while time.time() < put + deadline_s:
        time.sleep(0.05)
    for _ in range(MOST_RESTARTS):
        engine.close()
        engine.log.close()
        engine = DirectEngine(settings, SqliteLog(tmp_path))
        engine.late.tick(100.0)
        engine.late.tick(100.0 + 0.9 * deadline_s)
        assert engine.ledger.waiting == len(samples) * (1 + others)
    engine.close()
    engine.log.close()
    engine = DirectEngine(settings, SqliteLog(tmp_path))
    for group in list(engine.state.late.waiting.values())[:others]:
        group.awaited = msgspec.structs.replace(group.awaited, epoch=0, at=0.0)
    engine.late.tick(100.0)
    assert dict(engine.ledger.dropped) == {"columns missing": len(samples) * (1 + others)}
    engine.close()
    engine.log.close()


def turn_s(engine: DirectEngine, backlog: int) -> float:
    """Processor time of 20 turns in which a judge waits for a column that no group lacks: the least of several."""
    free = engine.state.late.free
    free["rewards"] = OrderedDict.fromkeys(range(1, backlog + 1))
    sent: list[Send] = []
    unused: Any = None
    judges = ColumnLeases(engine, Leases(engine.recorder), unused, unused, sent.append, unused)
    wanted = LeaseColumns(ticket=1, worker="w", column="teacher_logprobs", groups=8, lease_s=30.0, direct=True)
    judges.on_message("judge", wanted, now=0.0)
    took = []
    for _ in range(5):
        began = time.process_time()
        for _ in range(20):
            judges.turn(now=0.0)
        took.append(time.process_time() - began)
    assert not sent
    return min(took)


def test_a_judge_that_waits_does_not_pay_for_the_groups_that_lack_another_column(tmp_path: Path) -> None:
    settings = PlaneSettings(
        packing=Packing(ranks=1, seq_len=64),
        target=Target(groups=1),
        needs=("rewards", *TOKENS),
        needs_deadline_s=60.0,
    )
    engine = DirectEngine(settings, SqliteLog(tmp_path))
    assert turn_s(engine, 100_000) < 5 * turn_s(engine, 10) + 0.001
    engine.state.late.free.clear()
    engine.close()
    engine.log.close()


def test_a_judge_that_asks_again_while_its_samples_are_read_does_not_have_them_read_again(tmp_path: Path) -> None:
    settings = PlaneSettings(
        packing=Packing(ranks=1, seq_len=64), target=Target(groups=1), needs=("rewards",), needs_deadline_s=60.0
    )
    engine = DirectEngine(settings, SqliteLog(tmp_path))
    samples = [sample.replace(rewards=None, advantages=None) for sample in named_group("g")]
    assert engine.put("g", "g", encode(samples)) is None and not engine.flush()[0].error
    sent: list[Send] = []
    workers, leases = Inline(), Leases(engine.recorder)
    alive = Pulse(epoch=1, session=0, waiting_for="")
    admission = admission_of(settings, engine.log, engine, lambda: alive, lambda _peer: True)
    judges = ColumnLeases(engine, leases, workers, admission, sent.append, look_at_frame)
    wanted = LeaseColumns(ticket=1, worker="w", column="rewards", groups=8, lease_s=30.0)
    judges.on_message("judge", wanted, now=0.0)
    judges.turn(now=0.0)
    leases.turn(now=0.0)
    for _ in range(3):
        judges.on_message("judge", wanted, now=1.0)
    assert len(workers.results) == 1
    assert [type(one.message) for one in sent] == 3 * [Pulse]  # else it would take the plane for lost
    sent.clear()
    workers.finish()
    judges.on_message("judge", wanted, now=2.0)  # the answer was lost
    workers.finish()
    assert len(sent) == 2 and sent[0].message == sent[1].message
    engine.close()
    engine.log.close()
