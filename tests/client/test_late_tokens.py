"""Late columns with values per token: attached by a teacher, trained as if the groups had been put with them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.client.column_lease import _Worker
from penstock.errors import Conflict, InvalidInput
from penstock.log import reading
from tests.support.late_groups import arrays_of, nothing_to_delete, rollout, taken
from tests.support.pace import eventually
from tests.support.planes import FAST

TEACHER = "teacher_logprobs"
LATE: dict[str, Any] = {"needs": (TEACHER,), "needs_deadline_s": 600.0}
SETTINGS: dict[str, Any] = {"ranks": 1, "seq_len": 64, "groups_per_step": 1, "timeouts": FAST}


def samples_of(name: str, count: int = 3) -> list[ps.Sample]:
    rng = np.random.default_rng(7)
    group = ps.convert.make_group([rollout(rng, float(i)) for i in range(count)], prompt="p", id=name)
    return list(group.samples)


def teacher(sample: ps.Sample) -> np.ndarray[Any, Any]:
    return -np.random.default_rng(sample.token_ids.astype(np.int64)).random(sample.num_tokens).astype(np.float32)


@pytest.fixture(params=["embedded", "tcp", "tcp inline"])
def planes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[ps.Plane, ps.Plane]]:
    """The plane, and a client of it."""
    direct = request.param != "tcp inline"
    with ps.open(tmp_path, direct=direct, listen=("tcp://127.0.0.1:*",), **SETTINGS, **LATE) as server:
        if request.param == "embedded":
            yield server, server
        else:
            with ps.open(server.url, timeouts=FAST) as client:
                yield server, client
        assert server.ledger.balanced
        assert server.status()["storage"]["unregistered"] == []


def test_arrays_are_those_of_a_group_that_was_put_with_the_column(
    planes: tuple[ps.Plane, ps.Plane], tmp_path_factory: pytest.TempPathFactory
) -> None:
    server, client = planes
    client.put(samples_of("g"))
    assert client.ledger.waiting == 3
    (lease,) = client.lacking(TEACHER, timeout=0)
    assert lease.attach({sample.id: teacher(sample) for sample in lease.samples}) == (3, 0, 0)
    assert (client.ledger.held, client.ledger.waiting) == (3, 0)
    late, step = taken(client if client is server else server)
    with ps.open(tmp_path_factory.mktemp("once"), **SETTINGS) as other:
        other.put([sample.replace(**{TEACHER: teacher(sample)}) for sample in samples_of("g")])
        once, same = taken(other)
    assert late == once
    assert step.digest == same.digest


@pytest.mark.parametrize("direct", [True, False])
def test_producer_judge_and_rank_on_tcp_train_late_numbers_and_late_values_per_token(
    tmp_path: Path, direct: bool
) -> None:
    needs: dict[str, Any] = {"needs": ("rewards", TEACHER), "needs_deadline_s": 600.0}
    with ps.open(tmp_path / "run", direct=direct, listen=("tcp://127.0.0.1:*",), **SETTINGS, **needs) as server:
        with ps.open(server.url, timeouts=FAST) as producer, producer.group("p", id="g", advantage="grpo") as group:
            rng = np.random.default_rng(7)
            for _ in range(3):
                group.add(rollout(rng))
        with ps.open(server.url, timeouts=FAST) as judge:
            (lease,) = judge.lacking("rewards", timeout=0)
            lease.attach({sample.id: float(sample.id[-1]) for sample in lease.samples})
            (lease,) = judge.lacking(TEACHER, timeout=0)
            lease.attach({sample.id: teacher(sample) for sample in lease.samples})
        with ps.connect(server.url, rank=0, world=1, timeouts=FAST) as source:
            step = source.step(timeout=120)
            late = [arrays_of(batch) for batch in step]
            source.commit(step)
            source.flush(120)
    with ps.open(tmp_path / "once", **SETTINGS) as other:
        other.put([sample.replace(**{TEACHER: teacher(sample)}) for sample in samples_of("g")])
        assert late == taken(other)[0]


def test_a_few_samples_at_a_time_are_attached_once_and_never_changed(planes: tuple[ps.Plane, ps.Plane]) -> None:
    _, client = planes
    client.put(samples_of("g"))
    (lease,) = client.lacking(TEACHER, timeout=0)
    given = {sample.id: teacher(sample) for sample in lease.samples}
    assert lease.attach({"g/1": given["g/1"]}) == (1, 0, 0)
    assert lease.attach({"g/1": given["g/1"].tolist()}) == (0, 1, 0)
    other = np.zeros_like(given["g/1"])
    for _ in range(2):  # while it waits, and when it is in its table
        with pytest.raises(Conflict, match=r"group 'g' sample 'g/1' has values of digest \w+, now values of digest"):
            client.attach(TEACHER, {"g": {"g/1": other}})
        lease.attach(given)
    assert client.attach(TEACHER, {"g": given}) == (0, 3, 0)
    assert client.ledger.held == 3
    counts = client.status()["counts"]
    assert counts["values_attached"] == 3
    assert counts["groups_admitted"] == 1


def test_values_that_do_not_fit_are_rejected_with_sample_and_column(planes: tuple[ps.Plane, ps.Plane]) -> None:
    _, client = planes
    client.put(samples_of("g"))
    (lease,) = client.lacking(TEACHER, timeout=0)
    count = lease.samples[0].num_tokens
    wrong: list[tuple[Any, str]] = [
        ([0.0, -1.0], rf"group 'g' sample 'g/0': 2 values, and the sample has {count} tokens; give one per token"),
        (-1.0, r"sample 'g/0'.teacher_logprobs: 0 dimensions"),
        (["a"] * 4, r"sample 'g/0'.teacher_logprobs: dtype <U1"),
        (np.full(count, np.nan), r"teacher_logprobs\[\d\]: is NaN; this column allows none on trained tokens"),
        (np.full(count, 2.0), r"sample 'g/0'.teacher_logprobs\[\d\]: is 2; must be at most 0.001"),
        ({"logprobs": [0.0]}, r"sample 'g/0': columns 'logprobs'; give teacher_logprobs"),
        (None, r"sample 'g/0': teacher_logprobs is None; give its values, or the sample in `errors`"),
    ]
    for values, text in wrong:
        with pytest.raises(InvalidInput, match=text):
            lease.attach({"g/0": values, "g/1": teacher(lease.samples[1])})
        with pytest.raises(InvalidInput, match=text):
            client.attach(TEACHER, {"g": {"g/0": values}})
    assert lease.attach({sample.id: teacher(sample) for sample in lease.samples}) == (3, 0, 0)


def test_a_sample_with_values_and_an_error_is_rejected_and_a_group_without_values_is_none(
    planes: tuple[ps.Plane, ps.Plane],
) -> None:
    _, client = planes
    client.put(samples_of("g"))
    (lease,) = client.lacking(TEACHER, timeout=0)
    values = {sample.id: teacher(sample) for sample in lease.samples}
    with pytest.raises(InvalidInput, match="sample 'g/1' has a value and an error"):
        lease.attach(values, errors={"g/1": "timed out"})
    with pytest.raises(InvalidInput, match="sample 'g/1' has a value and an error"):
        client.attach(TEACHER, {"g": values}, errors={"g": {"g/1": "timed out"}})
    assert client.ledger.waiting == 3
    for column in (TEACHER, "rewards"):
        assert client.attach(column, {"g": {}}) == client.attach(column, {}) == (0, 0, 0)


def test_workers_that_attach_to_one_group_at_the_same_time_lose_nothing(planes: tuple[ps.Plane, ps.Plane]) -> None:
    _, client = planes
    client.put(samples_of("g", 8))
    (lease,) = client.lacking(TEACHER, timeout=0)
    given = {sample.id: teacher(sample) for sample in lease.samples}

    def work(name: str) -> int:
        attach = lease.attach if int(name[-1]) % 2 else lambda values: client.attach(TEACHER, {"g": values})
        return attach({name: given[name]}).new

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, given)) == [1] * 8
        assert list(pool.map(work, given)) == [0] * 8
    assert client.ledger.held == 8


def test_old_frames_are_freed_and_a_repeated_put_is_recognised(planes: tuple[ps.Plane, ps.Plane]) -> None:
    server, client = planes
    for name in ("a", "b"):
        client.put(samples_of(name))
    for lease in client.lacking(TEACHER, groups=1, timeout=0):
        for sample in lease.samples:
            lease.attach({sample.id: teacher(sample)})
    assert client.put(samples_of("a")) is False
    with pytest.raises(Conflict, match="accepted before with other content"):
        client.put(samples_of("a", 2))
    eventually(lambda: nothing_to_delete(server))
    live = server.status()["storage"]["live_bytes"]
    rows = [ps.encode([s.replace(**{TEACHER: teacher(s)}) for s in samples_of(name)]) for name in ("a", "b")]
    assert live == sum(map(len, rows))


@pytest.mark.parametrize("direct", [True, False])
def test_a_worker_that_sees_the_storage_writes_the_new_frame_itself(tmp_path: Path, direct: bool) -> None:
    with ps.open(tmp_path, direct=direct, listen=("tcp://127.0.0.1:*",), **SETTINGS, **LATE) as server:
        server.put(samples_of("g"))
        before = location_of(tmp_path, "g")
        with ps.open(server.url, timeouts=FAST) as client:
            (lease,) = client.lacking(TEACHER, timeout=0)
            lease.attach({"g/0": teacher(lease.samples[0])})
            middle, writer = location_of(tmp_path, "g")
            assert (writer == "plane") is not direct
            # The frame that it leased is gone by now: the plane makes the next one.
            lease.attach({sample.id: teacher(sample) for sample in lease.samples})
            last, writer = location_of(tmp_path, "g")
            assert writer == "plane"
        assert len({before[0], middle, last}) == 3
        assert server.ledger.held == 3


def test_a_worker_whose_group_got_a_new_frame_from_another_worker_goes_on_writing_frames_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs: dict[str, Any] = {"needs": (TEACHER, "ref_kl_weights"), "needs_deadline_s": 600.0}
    with (
        ps.open(tmp_path, listen=("tcp://127.0.0.1:*",), **SETTINGS, **needs) as server,
        ps.open(server.url, timeouts=FAST) as other,
        ps.open(server.url, timeouts=FAST) as client,
    ):
        server.put(samples_of("g"))
        first, _ = location_of(tmp_path, "g")
        read, calls = _Worker._read, itertools.count()

        def read_late(self: _Worker, *answer: Any) -> Any:
            """Read samples only once another worker has attached its column to them."""
            if next(calls) == 0:
                for lease in other.lacking(TEACHER, timeout=0):
                    lease.attach({sample.id: teacher(sample) for sample in lease.samples})
                eventually(lambda: nothing_to_delete(server))
            return read(self, *answer)

        monkeypatch.setattr(_Worker, "_read", read_late)
        (lease,) = client.lacking("ref_kl_weights", timeout=0)
        assert lease.attach({sample.id: np.ones(sample.num_tokens) for sample in lease.samples}) == (3, 0, 0)
        last, writer = location_of(tmp_path, "g")
        assert last != first
        assert writer != "plane"
        assert server.ledger.held == 3


def location_of(folder: Path, group: str) -> tuple[str, str]:
    """Return where a frame is, and who wrote it."""
    with reading(folder) as log:
        writers = {row.name: row.writer for row in log.segments()}
        location = log.location_of(group)
    return location, writers[location.partition(":")[0]]


def test_columns_of_the_run_and_top_k_of_a_teacher_may_come_later(tmp_path: Path) -> None:
    own = [ps.Column("turn_weights", dtype="float32", fill=1.0), ps.Column("quality", dtype="int8", per="sample")]
    needs = ("turn_weights", "quality", "teacher_topk_logprobs", "rewards")
    with ps.open(tmp_path, columns=own, needs=needs, needs_deadline_s=600, **SETTINGS) as plane:
        plane.put([sample.replace(rewards=None) for sample in samples_of("g", 1)])
        count = samples_of("g", 1)[0].num_tokens
        assert plane.attach("turn_weights", {"g": {"g/0": list(range(count))}}) == (1, 0, 0)
        assert plane.attach("turn_weights", {"g": {"g/0": np.arange(count, dtype=np.float64)}}) == (0, 1, 0)
        assert plane.attach("quality", {"g": {"g/0": 3}}) == (1, 0, 0)
        pair: Mapping[str, Any] = {
            "teacher_topk_ids": np.ones((count, 2), np.uint32),
            "teacher_topk_logprobs": np.full((count, 2), -0.5, np.float32),
        }
        assert plane.attach("teacher_topk_logprobs", {"g": {"g/0": pair}}) == (1, 0, 0)
        assert plane.ledger.waiting == 1
        assert plane.attach("rewards", {"g": {"g/0": 2.0}}) == (1, 0, 0)
        (found,), _ = taken(plane)
    assert found["turn_weights"][:count] == list(range(count))
    assert set(found["quality"][:count]) == {3}
    assert found["teacher_topk_logprobs"][0] == [-0.5, -0.5]
    assert found["rewards"][0] == 2.0
