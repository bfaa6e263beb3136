"""ATIF trajectories: what harbor and NeMo-Gym write becomes samples with the tokens of the model calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import InvalidInput
from penstock.integrations.formats.file_formats import convert_files, read_samples
from penstock.integrations.formats.shared import Lost
from penstock.integrations.formats.trajectory_files import from_atif


def agent(number: int, prompt: list[int], said: list[int], **more: Any) -> dict[str, Any]:
    metrics = {"prompt_token_ids": prompt, "completion_token_ids": said, "logprobs": [-0.5] * len(said)}
    return {"step_id": number, "source": "agent", "message": "...", "metrics": metrics, **more}


def trajectory(**more: Any) -> dict[str, Any]:
    steps = [
        {"step_id": 1, "source": "user", "message": "hello"},
        agent(2, [1, 2], [3, 4]),
        agent(3, [1, 2, 3, 4, 5], [6]),
    ]
    return {
        "schema_version": "ATIF-v1.7",
        "session_id": "s",
        "trajectory_id": "t",
        "agent": {"name": "terminus", "version": "1"},
        "steps": steps,
        **more,
    }


@pytest.mark.parametrize("indent", [None, 2])
def test_a_file_becomes_one_sample_with_each_token_once(tmp_path: Path, indent: int | None) -> None:
    path = tmp_path / "trajectory.json"
    path.write_text(json.dumps(trajectory(extra={"reward": 0.5}), indent=indent))
    done = convert_files([str(path)], f"{tmp_path}/out.jsonl")
    assert (done.sources, done.samples, done.loss_tokens) == (("atif",), 1, 3)
    [sample] = read_samples(f"{tmp_path}/out.jsonl", Lost())
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert sample.loss_mask.tolist() == [False, False, True, True, False, True]
    assert np.all(sample["logprobs"][sample.loss_mask] == -0.5) and float(sample["rewards"]) == 0.5


def test_a_harbor_trial_has_its_reward_beside_it(tmp_path: Path) -> None:
    (tmp_path / "agent").mkdir()
    (tmp_path / "verifier").mkdir()
    (tmp_path / "verifier" / "reward.txt").write_text("1.0\n")
    path = tmp_path / "agent" / "trajectory.json"
    path.write_text(json.dumps(trajectory(), indent=2))
    [sample] = read_samples(str(path), Lost())
    assert float(sample["rewards"]) == 1.0
    (tmp_path / "verifier" / "reward.txt").write_text("none")
    with pytest.raises(InvalidInput, match=r"reward.txt: 'none'; must be a number"):
        list(read_samples(str(path), Lost()))


def test_rollouts_of_one_gym_task_are_a_group(tmp_path: Path) -> None:
    path = tmp_path / "many.jsonl"
    gym = {"nemo_gym": {"source": {"task_index": 3}}}
    path.write_text("".join(json.dumps(trajectory(trajectory_id=f"s:3:{i}", extra=gym)) + "\n" for i in range(2)))
    samples = list(read_samples(str(path), Lost()))
    assert [(sample.id, sample.group) for sample in samples] == [("s:3:0", "s:3"), ("s:3:1", "s:3")]


def test_what_cannot_be_trained_is_counted() -> None:
    lost = Lost()
    record = trajectory()
    record["steps"] += [
        agent(4, [1], [2], is_copied_context=True),
        {"step_id": 5, "source": "agent", "message": "text alone"},
        agent(6, [1], [2], llm_call_count=3),
        {"step_id": 7, "source": "agent", "message": "a program", "llm_call_count": 0},
    ]
    record["subagent_trajectories"] = [trajectory(trajectory_id="child")]
    record["continued_trajectory_ref"] = "next.json"
    assert [rollout.id for rollout in from_atif(record, lost=lost)] == ["t", "child"]
    assert dict(lost.unread) == {
        "copied step": 1,
        "agent step without token ids": 1,
        "agent step of several model calls": 1,
        "continued_trajectory_ref": 1,
    }


def test_text_without_ids_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(trajectory(steps=[{"step_id": 1, "source": "agent", "message": "text"}])))
    with pytest.raises(InvalidInput, match="no step has token ids; record prompt_token_ids"):
        list(read_samples(str(path), Lost()))
    path.write_text(json.dumps(trajectory(schema_version="ATIF-v2.0")))
    with pytest.raises(InvalidInput, match=r"schema_version: 'ATIF-v2.0'; must be ATIF-v1.N"):
        list(read_samples(str(path), Lost()))
