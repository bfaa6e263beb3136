"""Groups that no step can be made with: who is to blame, and what can be decided about them."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import penstock as ps
from penstock.arrays import Sample
from penstock.arrays.sample_metadata import SampleMetadata
from penstock.cli import main
from penstock.errors import Conflict, CorruptFrame, InvalidInput, StepAborted, UnknownKey
from penstock.frames import encode
from penstock.frames.metadata import GroupMetadata
from penstock.packing import Packing, plan
from penstock.plane import step_builder
from penstock.plane.settings import Replay, Target
from penstock.plane.step_builder import PlannedStep, StepBuilder
from penstock.protocol.steps import Staged
from tests.support.engines import DirectEngine, damage_frame
from tests.support.groups import named_group
from tests.support.planes import OpenEngine, OpenPlane


def bare(name: str, run: str = "") -> list[Sample]:
    """A group without log-probabilities."""
    return [Sample.from_prompt(id=f"{name}/0", group=name, run=run, prompt_ids=[1], completion_ids=[2, 3])]


def put(engine: DirectEngine, *groups: Sequence[Sample]) -> None:
    for group in groups:
        assert engine.put(group[0].group, group[0].group, encode(group)) is None
    assert all(outcome.error is None for outcome in engine.flush())


# ------------------------------------------------------------------ rewinding to steps that used them

TWICE = Replay(capacity=8, max_times_sampled=2)


def trained_then_set_aside(engine: DirectEngine) -> None:
    """Steps of groups a and b are trained; then the frame of a is damaged, and step 3 is made without it."""
    put(engine, named_group("a"), named_group("b"))
    for step in (1, 2, 3):
        if step == 3:
            damage_frame(engine, "a")
        assert isinstance(engine.plan_step(step), Staged)
        engine.received(step)
        engine.commit(step, None)
    assert [group["id"] for group in engine.quarantine()] == ["a"]


def test_a_step_whose_group_was_set_aside_since_is_planned_anew_when_ranks_rewind_to_it(
    open_engine: OpenEngine,
) -> None:
    engine = open_engine(target=Target(groups=1), replay=TWICE)
    trained_then_set_aside(engine)
    engine.resume(2, 1)
    with pytest.raises(CorruptFrame, match=r"group 'a': .*; it was set aside, steps 1 to 3 are planned again"):
        engine.stage_again(1)
    assert isinstance(engine.plan_step(1), Staged)
    assert [group["id"] for group in engine.quarantine()] == ["a"]


def test_a_step_whose_group_was_set_aside_and_dropped_since_is_planned_anew(open_engine: OpenEngine) -> None:
    engine = open_engine(target=Target(groups=1), replay=TWICE)
    trained_then_set_aside(engine)
    engine.settle("a", drop=True)
    engine.resume(2, 1)
    with pytest.raises(CorruptFrame, match=r"group 'a': .* freed.*; it was set aside, steps 1 to 3 are planned"):
        engine.stage_again(1)
    assert isinstance(engine.plan_step(1), Staged)


def test_a_group_that_was_set_aside_with_a_frame_in_order_is_served_again_to_the_byte(
    open_engine: OpenEngine, tmp_path: Path
) -> None:
    engine = open_engine(tmp_path, target=Target(groups=1), replay=TWICE)
    put(engine, bare("x"))
    first = engine.plan_step(1)
    assert isinstance(first, Staged)
    engine.received(1)
    engine.commit(1, None)
    put(engine, named_group("a"), named_group("b"))  # x is odd from now on
    assert isinstance(engine.plan_step(2), Staged)
    assert [group["id"] for group in engine.quarantine()] == ["x"]
    engine.resume(2, 1)
    assert engine.stage_again(1).digests == first.digests
    engine.log.close()
    again = open_engine(tmp_path, target=Target(groups=1), replay=TWICE)
    assert again.stage_again(1).digests == first.digests


# ------------------------------------------------------------------ blame


@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_the_odd_group_is_set_aside_wherever_it_stands(open_engine: OpenEngine, where: str) -> None:
    engine = open_engine(target=Target(groups=4))
    good = [named_group(f"g{i}") for i in range(40)]
    at = {"first": 0, "middle": 20, "last": 40}[where]
    put(engine, *good[:at], bare("odd"), *good[at:])
    staged = engine.plan_step(1)
    assert isinstance(staged, Staged)
    assert [group["id"] for group in engine.quarantine()] == ["odd"]
    assert "logprobs: this group is without it, 40 held groups are with it" in engine.quarantine()[0]["reason"]
    assert engine.ledger.held + engine.ledger.scheduled == 80


def test_groups_of_another_mode_that_have_the_column_are_no_reason_to_fill_it(open_engine: OpenEngine) -> None:
    engine = open_engine(target=Target(groups=2))
    supervised = [[s.replace(mode="sft") for s in named_group(f"sft{i}")] for i in range(3)]
    put(engine, *supervised, bare("odd"))
    assert isinstance(engine.plan_step(1), Staged)
    assert [group["id"] for group in engine.quarantine()] == ["odd"]


def test_on_a_tie_those_that_lack_the_column_are_set_aside(open_engine: OpenEngine) -> None:
    engine = open_engine(target=Target(groups=2))
    put(engine, bare("x"), bare("y"), named_group("a"), named_group("b"))
    assert isinstance(engine.plan_step(1), Staged)
    assert [group["id"] for group in engine.quarantine()] == ["x", "y"]


def test_a_bad_run_does_not_cost_the_good_ones_their_place(open_engine: OpenEngine) -> None:
    shares = {"a": 1.0, "b": 1.0, "c": 1.0}
    engine = open_engine(shares=shares, target=Target(groups=3))
    for i in range(4):
        put(engine, bare(f"a{i}", "a"), named_group(f"b{i}", run="b"), named_group(f"c{i}", run="c"))
    assert isinstance(engine.plan_step(1), Staged)
    assert {group["run"] for group in engine.quarantine()} == {"a"}


def test_what_a_plane_needs_is_refused_at_put_with_an_error_to_the_sender(open_plane: OpenPlane) -> None:
    plane = open_plane(needs=("logprobs",), groups_per_step=1, ranks=1)
    with pytest.raises(InvalidInput, match=r"group 'odd': no logprobs in sample 'odd/0'.*which this plane needs"):
        plane.put(bare("odd"))
    plane.put(named_group("good"))
    assert plane.ledger.accepted == 2 and plane.ledger.quarantined == 0


@pytest.mark.parametrize("mode", ["rl", "sft"])
def test_a_required_column_is_required_of_every_trained_sample_whatever_its_mode(
    open_plane: OpenPlane, mode: str
) -> None:
    plane = open_plane(needs=("teacher_logprobs",), groups_per_step=1, ranks=1)
    first, second = (sample.replace(mode=mode) for sample in named_group("g"))
    with pytest.raises(InvalidInput, match=r"no teacher_logprobs in sample 'g/0' \(2 of 2 samples\)"):
        plane.put([first, second])
    scored = first.replace(teacher_logprobs=[-0.5] * first.num_tokens)
    with pytest.raises(InvalidInput, match=r"no teacher_logprobs in sample 'g/1' \(1 of 2 samples\)"):
        plane.put([scored, second])
    untrained = second.replace(loss_mask=[False] * second.num_tokens)
    assert plane.put([scored, untrained])


def test_a_group_that_is_of_two_kinds_itself_is_refused(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1)
    first, second = named_group("g")
    mixed = [first, Sample.from_prompt(id="g/1", group="g", prompt_ids=[1], completion_ids=[2, 3])]
    assert second.group == "g"
    with pytest.raises(InvalidInput, match="sample 'g/1' has no logprobs, which 1 other"):
        plane.put(mixed)


@pytest.mark.deep
def test_many_odd_groups_are_found_in_one_pass(open_engine: OpenEngine) -> None:
    engine = open_engine(target=Target(groups=4))
    put(engine, *(bare(f"odd{i}") for i in range(600)), *(named_group(f"g{i}") for i in range(601)))
    began = time.process_time()
    assert isinstance(engine.plan_step(1), Staged)
    assert time.process_time() - began < 1.0
    assert len(engine.quarantine(1000)) == 600


# ------------------------------------------------------------------ poison


@pytest.mark.parametrize("version", [2**53 + 1, 2**63 - 1, 1_763_000_000_000_000_000])
def test_a_policy_version_beyond_its_bound_is_refused_where_it_enters(version: int) -> None:
    with pytest.raises(InvalidInput, match="version"):
        named_group("a", policy_version=version)


def test_the_largest_policy_version_can_be_trained_and_committed(open_engine: OpenEngine, tmp_path: Path) -> None:
    engine = open_engine(tmp_path)
    put(engine, named_group("a", policy_version=2**53), named_group("b", policy_version=0))
    staged = engine.plan_step(1)
    assert isinstance(staged, Staged)
    engine.received(1)
    engine.commit(1, 2**53)
    engine.log.close()
    again = open_engine(tmp_path)
    assert again.policy_version == 2**53
    assert again.tenant_tables.metrics()


class Failing(StepBuilder):
    """A builder that cannot plan, for a reason nobody thought of."""

    def plan(self, metadata: Sequence[GroupMetadata], oldest_version: int = 0) -> PlannedStep:
        raise RuntimeError(f"no plan for {len(metadata)} groups")


def test_an_unknown_failure_in_planning_is_an_error_to_ranks_and_not_the_end(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1, groups_per_step=1)
    assert plane._server is not None
    pipeline = plane._server._pipeline
    working = pipeline._builder
    pipeline._builder = Failing(plane._server.settings.packing, plane._server.engine.storage)
    plane.put(named_group("a"))
    source = plane.source(0)
    with pytest.raises(StepAborted, match="no plan for 1 groups"):
        source.step(timeout=30)
    source.close()
    pipeline._builder = working
    assert plane.ledger.held == 2  # it was not lost, and nobody was to blame
    again = plane.source(0)
    assert again.step(timeout=30).loss_tokens > 0
    again.close()


# ------------------------------------------------------------------ deciding


def with_one_aside(engine: DirectEngine) -> None:
    put(engine, bare("odd"), named_group("a"), named_group("b"), named_group("c"))
    assert isinstance(engine.plan_step(1), Staged)


def test_a_group_that_is_released_waits_again_and_is_trained_when_it_fits(
    open_engine: OpenEngine, tmp_path: Path
) -> None:
    engine = open_engine(tmp_path)
    with_one_aside(engine)
    engine.settle("odd", drop=False)
    assert (engine.ledger.quarantined, engine.ledger.held) == (0, 3)
    engine.close()
    engine.log.close()
    again = open_engine(tmp_path)
    assert again.ledger.as_dict() == engine.ledger.as_dict()
    assert again.state.kinds == engine.state.kinds
    with pytest.raises(UnknownKey, match="not in quarantine; there are: none"):
        again.settle("odd", drop=True)


def test_a_group_that_is_dropped_is_counted_and_its_frame_freeing(open_engine: OpenEngine) -> None:
    engine = open_engine()
    with_one_aside(engine)
    before = engine.segments.num_bytes
    engine.settle("odd", drop=True)
    engine.close()
    assert dict(engine.ledger.dropped) == {"quarantined": 1}
    assert engine.segments.num_bytes < before


@pytest.mark.parametrize("choice", ["--release", "--drop"])
def test_quarantine_is_listed_and_decided_without_a_plane_at_work(
    open_engine: OpenEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str], choice: str
) -> None:
    engine = open_engine(tmp_path)
    with_one_aside(engine)
    engine.close()
    with pytest.raises(Conflict, match="its plane is at work: give its address"):
        from penstock.runs.run_log import settle_offline

        settle_offline(tmp_path, "odd", drop=True)
    engine.log.close()
    assert main(["quarantine", str(tmp_path)]) == 0
    assert "odd" in capsys.readouterr().out
    assert main(["quarantine", str(tmp_path), choice, "nobody"]) == 1
    assert "not in quarantine; there are: 'odd'" in capsys.readouterr().err
    assert main(["quarantine", str(tmp_path), choice, "odd", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"quarantine": []}
    again = open_engine(tmp_path)
    assert again.ledger.quarantined == 0
    assert again.ledger.dropped.total() == (1 if choice == "--drop" else 0)


def test_quarantine_is_decided_at_a_plane_at_work(open_plane: OpenPlane, capsys: pytest.CaptureFixture[str]) -> None:
    plane = open_plane(ranks=1, groups_per_step=2, listen=["tcp://127.0.0.1:*"])
    for group in (bare("odd"), named_group("a"), named_group("b")):
        plane.put(group)
    source = plane.source(0)
    source.step(timeout=30)
    assert plane._server is not None
    url = next(url for url in plane._server.urls if url.startswith("tcp"))
    assert main(["quarantine", url]) == 0
    assert "odd" in capsys.readouterr().out
    assert main(["quarantine", url, "--drop", "odd"]) == 0
    assert "Nothing is in quarantine." in capsys.readouterr().out
    assert dict(plane.ledger.dropped) == {"quarantined": 1}
    source.close()


def test_replay_settings_that_do_not_fit_a_run_are_refused_with_both_values(
    open_engine: OpenEngine, tmp_path: Path
) -> None:
    engine = open_engine(tmp_path)
    put(engine, *(named_group(f"g{i}") for i in range(6)))
    engine.log.close()
    with pytest.raises(ps.PenstockError, match="capacity: 4, but 6 groups are held"):
        open_engine(tmp_path, replay=Replay(capacity=4))


@pytest.mark.parametrize("error", [RuntimeError("boom"), MemoryError("boom"), InvalidInput("boom")], ids=repr)
def test_a_packer_that_fails_on_everything_is_the_planes_failure_and_no_groups(
    open_plane: OpenPlane, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    plane = open_plane(ranks=2, groups_per_step=2)
    for i in range(8):
        plane.put(named_group(f"g{i}"))

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(step_builder, "plan", fail)
        ranks = [plane.source(rank) for rank in range(2)]
        with ThreadPoolExecutor(2) as pool:
            for waiting in [pool.submit(source.step, timeout=60) for source in ranks]:
                with pytest.raises(StepAborted, match="boom"):
                    waiting.result(120)
        for source in ranks:
            source.close()
        assert plane.ledger.quarantined == 0 and plane.ledger.held == 16
    ranks = [plane.source(rank) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        steps = [waiting.result(120) for waiting in [pool.submit(source.step, timeout=60) for source in ranks]]
    assert steps[0].accounting.total.samples == 4
    for source in ranks:
        source.close()


def test_groups_that_all_fail_are_set_aside_where_another_group_can_be_planned(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(target=Target(groups=2))
    put(engine, *(named_group(f"g{i}") for i in range(5)))

    def picky(metadata: SampleMetadata, packing: Packing) -> object:
        if {"g0", "g1"} & set(metadata.group):
            raise RuntimeError("boom")
        return plan(metadata, packing)

    monkeypatch.setattr(step_builder, "plan", picky)
    assert isinstance(engine.plan_step(1), Staged)
    assert {group["id"] for group in engine.quarantine()} == {"g0", "g1"}
