"""Dropping stale groups biases training towards short answers; pacing and dispatch order do not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.errors import InvalidInput
from penstock.runs import POLICIES, Rates, lognormal_workload, recorded_workload, simulate_staleness
from tests.runs.conftest import end, open_engine, put_to, step

WORKLOAD = lognormal_workload(2000, 8, median=600, sigma=0.8, seed=0)
STEPS = 40


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, float]]:
    return {policy: simulate_staleness(policy, WORKLOAD, steps=STEPS) for policy in POLICIES}


def test_dropping_and_masking_favour_short_answers(found: dict[str, dict[str, float]]) -> None:
    assert found["drop"]["length_bias"] < -0.2 and found["drop"]["discarded"] > 0.4
    assert found["mask"]["length_bias"] < -0.2 and found["mask"]["discarded"] > 0.4
    assert found["drop"]["reward_bias"] > 0.05  # short answers are of easy prompts
    assert found["drop"]["staleness_max"] <= 2


@pytest.mark.parametrize("policy", ["pace", "window"])
def test_pacing_and_dispatch_order_train_what_is_generated(found: dict[str, dict[str, float]], policy: str) -> None:
    assert abs(found[policy]["length_bias"]) < 0.03 and abs(found[policy]["reward_bias"]) < 0.02
    assert found[policy]["discarded"] == 0 and found[policy]["staleness_mean"] < 2.5


def test_dispatch_order_bounds_the_oldest_group_and_replay_keeps_the_trainer_busy(
    found: dict[str, dict[str, float]],
) -> None:
    assert found["window"]["staleness_max"] < found["pace"]["staleness_max"]
    assert found["replay"]["idle"] < 0.1 < found["pace"]["idle"]
    assert all(one["steps"] == STEPS for one in found.values())


@pytest.mark.deep
def test_late_rewards_make_groups_older_and_the_window_trains_them_in_order_all_the_same() -> None:
    late = {policy: simulate_staleness(policy, WORKLOAD, rates=Rates(judge_s=30), steps=STEPS) for policy in POLICIES}
    assert all(one["steps"] == STEPS for one in late.values())
    soon = {policy: simulate_staleness(policy, WORKLOAD, steps=STEPS) for policy in ("drop", "pace")}
    assert late["drop"]["discarded"] > soon["drop"]["discarded"] + 0.05
    # Groups that wait for their judge count as begun, so pacing begins no more than can be trained in time.
    assert late["pace"]["idle"] > soon["pace"]["idle"] and late["pace"]["discarded"] == 0
    assert abs(late["window"]["length_bias"]) < 0.03 and late["window"]["staleness_max"] < late["pace"]["staleness_max"]


def test_the_same_workload_gives_the_same_figures() -> None:
    rates = Rates(groups_per_step=4, workers=8)
    once, again = (simulate_staleness("window", WORKLOAD, rates=rates, steps=10) for _ in range(2))
    assert once == again


def test_the_command_prints_plots_and_reads_a_recorded_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = open_engine(tmp_path / "run", retain="all")
    put_to(engine, *(f"g{i}" for i in range(6)))
    put_to(engine, "held out", evaluation=True)
    step(engine, 1)
    end(engine)
    recorded = recorded_workload(tmp_path / "run")
    assert len(recorded) == 6 and recorded.lengths[0].tolist() and len(recorded.rewards) == 6
    words = ["simulate", "staleness", "--steps", "5", "--groups", "2", "--workers", "4"]
    assert main([*words, "--from", str(tmp_path / "run"), "--policy", "pace", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pace"]["steps"] == 5
    assert main([*words, "--policy", "drop", "--judge-seconds", "20", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["drop"]["steps"] == 5
    assert main([*words, "--plot", str(tmp_path / "figure.svg")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["policy", *POLICIES]
    assert (tmp_path / "figure.svg").read_text().count("length bias") >= 1


def test_figures_out_of_range_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "staleness", "--steps", "0"]) == 1
    assert "--steps 0: give 1 to 100000" in capsys.readouterr().err
    with pytest.raises(InvalidInput, match="sigma"):
        lognormal_workload(10, 8, median=600, sigma=9, seed=0)
    with pytest.raises(InvalidInput, match="not one of drop"):
        simulate_staleness("dorp", WORKLOAD)


def test_a_run_that_has_few_or_none_of_its_groups_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "staleness", "--steps", "5", "--groups", "2", "--policy", "pace", "--from"]
    engine = open_engine(tmp_path, retain_steps=1)
    end(engine)
    assert main([*words, str(tmp_path)]) == 1
    assert "no group was put yet" in capsys.readouterr().err
    engine = open_engine(tmp_path, retain_steps=1)
    put_to(engine, *(f"g{i}" for i in range(6)))
    step(engine, 1)
    step(engine, 2)
    end(engine)
    assert main([*words, str(tmp_path)]) == 0
    kept = len(recorded_workload(tmp_path))
    assert f"{kept} groups of {tmp_path}; {6 - kept} others are freed" in capsys.readouterr().err
    assert kept < 6


@pytest.mark.parametrize("flag", ["--median=700", "--seed=0", "--samples=4", "--lengths=lognormal"])
def test_flags_of_a_made_up_workload_are_refused_for_a_recorded_one(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "staleness", "--from", "run", flag]) == 1
    assert f"{flag.partition('=')[0]} makes up a workload" in capsys.readouterr().err
