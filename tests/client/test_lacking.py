"""Scoring workers: groups that lack a column are leased, renewed while the worker lives, returned when it is gone."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.errors import Closed, InvalidInput, UnknownKey
from tests.support.groups import named_group
from tests.support.late_groups import LATE, put_late
from tests.support.pace import eventually, pace
from tests.support.planes import FAST

SETTINGS: dict[str, Any] = {"ranks": 1, "seq_len": 64, "groups_per_step": 1, "timeouts": FAST, **LATE}


class Words:
    """A tokenizer."""

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


@pytest.fixture(params=["embedded", "tcp", "tcp inline"])
def plane(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ps.Plane]:
    direct = request.param != "tcp inline"
    with ps.open(tmp_path, direct=direct, listen=("tcp://127.0.0.1:*",), **SETTINGS) as server:
        if request.param == "embedded":
            yield server
        else:
            with ps.open(server.url, timeouts=FAST) as client:
                yield client
        assert server.ledger.balanced


def score(lease: Any) -> dict[str, float]:
    return {sample.id: float(sample.token_ids[-1] % 7) for sample in lease.samples}


def test_a_worker_gets_the_samples_with_their_text_and_scores_them(plane: ps.Plane) -> None:
    for name in ("a", "bb", "ccc"):
        put_late(plane, name)
    seen = []
    for lease in plane.lacking("rewards", groups=2, tokenizer=Words(), timeout=0.1):
        for sample in lease.samples:
            trained = sample.token_ids[sample.loss_mask].tolist()
            assert lease.text(sample) == " ".join(map(str, sample.token_ids.tolist()))
            assert lease.text(sample, trained=True) == " ".join(map(str, trained))
        seen.append(sorted(lease.groups))
        assert lease.attach(score(lease)) == (len(lease.samples), 0, 0)
    assert seen == [["a", "bb"], ["ccc"]]
    assert (plane.ledger.held, plane.ledger.waiting) == (6, 0)


def test_a_worker_waits_for_groups_that_come_later(plane: ps.Plane) -> None:
    async def work() -> list[str]:
        put = asyncio.get_running_loop().run_in_executor(None, put_late, plane, "late")
        async for lease in plane.alacking("rewards"):
            assert await lease.aattach(score(lease)) == (2, 0, 0)
            await put
            return sorted(lease.groups)
        return []

    assert asyncio.run(work()) == ["late"]


def test_only_samples_that_still_lack_the_column_are_handed_out(plane: ps.Plane) -> None:
    put_late(plane, "g", 3)
    plane.attach("rewards", {"g": {"g/1": 0.5}})
    lease = next(iter(plane.lacking("rewards")))
    assert [sample.id for sample in lease.samples] == ["g/0", "g/2"]
    assert lease.attach({"g/0": 1.0}, errors={"g/2": "timed out"}) == (2, 0, 0)
    with pytest.raises(UnknownKey, match="sample 'g/1': not in this lease"):
        lease.attach({"g/1": 0.5})


def test_samples_of_the_same_name_in_two_groups_are_scored_by_group(plane: ps.Plane) -> None:
    for name in ("a", "b"):
        plane.put([s.replace(id="same", rewards=None) for s in named_group(name, samples=1)])
    lease = next(iter(plane.lacking("rewards")))
    with pytest.raises(UnknownKey, match=r"sample 'same': in 2 groups of it; attach by group: plane.attach"):
        lease.attach({"same": 1.0})
    assert plane.attach("rewards", {"a": {"same": 1.0}, "b": {"same": 0.0}}) == (2, 0, 0)


def test_a_leased_group_goes_to_one_worker_until_it_is_dropped_or_given_back(plane: ps.Plane) -> None:
    put_late(plane, "g")
    lease = next(iter(plane.lacking("rewards")))
    assert list(plane.lacking("rewards", timeout=0.0)) == []
    lease.give_back("out of memory")
    lease = next(iter(plane.lacking("rewards", timeout=60)))
    del lease  # a dropped lease returns by itself
    gc.collect()
    lease = next(iter(plane.lacking("rewards", timeout=60)))
    assert lease.attach(score(lease)).new == 2


@pytest.mark.deep
def test_a_lease_is_renewed_while_the_process_lives(plane: ps.Plane) -> None:
    put_late(plane, "g")
    lease = next(iter(plane.lacking("rewards", lease_s=0.5 * pace())))
    assert list(plane.lacking("rewards", timeout=1.5 * pace())) == []
    assert lease.attach(score(lease)).new == 2
    assert plane.status()["counts"]["leases_expired"] == 0


def test_who_was_slower_learns_it(plane: ps.Plane) -> None:
    put_late(plane, "g")
    lease = next(iter(plane.lacking("rewards", lease_s=1.0)))
    values = score(lease)
    plane.attach("rewards", {"g": values})
    eventually(lambda: bool(lease.cancelled))
    assert lease.cancelled == {"g": "completed: its values were attached"}
    assert lease.attach(values) == (0, 2, 0)


@pytest.mark.deep
def test_who_attaches_group_by_group_is_not_told_that_somebody_was_faster(plane: ps.Plane) -> None:
    for name in ("a", "bb"):
        put_late(plane, name)
    lease = next(iter(plane.lacking("rewards", lease_s=0.5 * pace())))
    values = score(lease)
    lease.attach({name: values[name] for name in ("a/0", "a/1")})
    assert list(plane.lacking("rewards", timeout=pace())) == []  # the other group is renewed meanwhile
    assert lease.cancelled == {}
    assert lease.attach({name: values[name] for name in ("bb/0", "bb/1")}).new == 2


def test_the_leases_of_a_client_that_closes_return_at_once(tmp_path: Path) -> None:
    with ps.open(tmp_path, listen=("tcp://127.0.0.1:*",), **SETTINGS) as server:
        put_late(server, "g")
        worker = ps.open(server.url, timeouts=FAST)
        lease = next(iter(worker.lacking("rewards", lease_s=600)))
        worker.close()
        with pytest.raises(Closed):
            lease.attach(score(lease))
        other = next(iter(server.lacking("rewards", timeout=60)))
        assert other.attach(score(other)).new == 2


def test_open_leases_survive_a_restart_of_the_plane(tmp_path: Path) -> None:
    for snapshot_every in (1, 1000):
        with ps.open(tmp_path, snapshot_every=snapshot_every, **SETTINGS) as plane:
            put_late(plane, f"g{snapshot_every}")
            lease = next(iter(plane.lacking("rewards", lease_s=600)))
            lease._finalize.detach()  # as if the process had not noticed
            plane._connection.renewals._held.clear()
        with ps.open(tmp_path, **SETTINGS) as plane:
            assert list(plane.lacking("rewards", timeout=0.0)) == []
            values = {sample.id: 1.0 for sample in lease.samples}
            assert plane.attach("rewards", {f"g{snapshot_every}": values}).new == 2
            assert plane._server is not None
            assert plane._server.engine.state.leases.open == {}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"groups": 0}, "0 groups; lease 1 to 256 at once"),
        ({"groups": 257}, "257 groups; lease 1 to 256 at once"),
        ({"lease_s": 0.0}, "lease_s: 0; give 0.5 to 86400 seconds"),
    ],
)
def test_requests_that_make_no_sense_are_rejected(tmp_path: Path, given: dict[str, Any], text: str) -> None:
    with ps.open(tmp_path, **SETTINGS) as plane, pytest.raises(InvalidInput, match=text):
        next(iter(plane.lacking("rewards", **given)))


def test_a_column_that_no_group_waits_for_is_an_error_and_no_endless_wait(plane: ps.Plane) -> None:
    with pytest.raises(InvalidInput, match=r"lacking 'rewardz': its groups wait for rewards; open the plane with"):
        next(iter(plane.lacking("rewardz")))


def test_values_of_a_lease_are_given_by_sample(plane: ps.Plane) -> None:
    put_late(plane, "g")
    lease = next(iter(plane.lacking("rewards")))
    with pytest.raises(InvalidInput, match="give values by sample id"):
        lease.attach([1.0, 0.0])  # type: ignore[arg-type]


def test_text_needs_a_tokenizer(tmp_path: Path) -> None:
    with ps.open(tmp_path, **SETTINGS) as plane:
        put_late(plane, "g")
        lease = next(iter(plane.lacking("rewards")))
        with pytest.raises(InvalidInput, match="no tokenizer"):
            lease.text(lease.samples[0])
