"""Events of Agent Lightning become trajectories, turn by turn."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.convert import make_group
from penstock.errors import InvalidInput
from penstock.integrations.formats.file_formats import convert_files
from penstock.integrations.formats.trajectory_files import from_agent_lightning


def request(prompt: list[int], ids: list[int], **more: Any) -> dict[str, Any]:
    content = [{"token": f"token_id:{i}", "logprob": -0.5} for i in ids]
    choice = {"token_ids": ids, "finish_reason": "stop", "logprobs": {"content": content}}
    data = {"response": {"prompt_token_ids": prompt, "choices": [choice]}, "request": {"temperature": 0.7}, **more}
    return {"event_type": "model_request", "rollout_id": "r1", "attempt_id": "0", "timestamp": 1.0, "data": data}


def reward(value: Any) -> dict[str, Any]:
    return {"event_type": "reward", "rollout_id": "r1", "attempt_id": "0", "data": {"value": value}}


def test_events_become_a_trajectory_turn_by_turn_with_the_last_reward() -> None:
    events = [
        request([1, 2], [3, 4], model_version=5),
        {"event_type": "tool", "rollout_id": "r1", "attempt_id": "0", "data": {}},
        reward(0.0),
        request([1, 2, 3, 4, 6], [7], model_version=6),
        reward(1.0),
    ]
    found = from_agent_lightning(events, id="r1", env="math")
    assert found.reward == 1.0 and found.num_turns == 2 and found.stop_condition == "stop"
    [sample] = make_group([found], id="g", advantage=None).samples
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 6, 7] and sample.policy_version == 5
    assert sample.loss_mask.tolist() == [False, False, True, True, False, True]
    assert float(np.unique(sample["temperatures"])[0]) == pytest.approx(0.7)


def test_triplets_failed_requests_retries_and_attempts_are_read_as_the_gateway_means_them() -> None:
    triplet = {"prompt_token_ids": [1, 2], "response_token_ids": [9], "response_log_probs": [-0.25]}
    retried = [request([1, 2], [3]), {**request([1, 2], [4])}, request([1, 2, 4], [5], http_status=500)]
    assert from_agent_lightning(retried).num_tokens == 3
    other = [{**request([8], [8]), "attempt_id": "1"}]
    assert from_agent_lightning([*retried, *other]).num_tokens == 2
    assert from_agent_lightning({"0": retried, "1": other}).num_tokens == 2
    found = from_agent_lightning([{"event_type": "model_request", "attempt_id": "0", "data": triplet}])
    assert found.turns[1].logprobs is not None and found.turns[1].logprobs.tolist() == [-0.25]
    with pytest.raises(InvalidInput, match="no model request with token ids"):
        from_agent_lightning([request([], [])])


def test_routed_experts_of_an_event_are_a_numpy_file_in_base64() -> None:
    file = io.BytesIO()
    np.save(file, np.arange(6, dtype=np.uint8).reshape(3, 1, 2))
    event = request([1, 2], [3, 4], routed_experts=base64.b64encode(file.getvalue()).decode())
    [sample] = make_group([from_agent_lightning([event])], id="g", advantage=None).samples
    assert sample["routed_experts"][:, 0].tolist() == [[0, 1], [2, 3], [4, 5], [0, 0]]
    with pytest.raises(InvalidInput, match=r"routed_experts: .*must be a numpy array in base64"):
        from_agent_lightning([request([1], [2], routed_experts="???")])


def test_files_of_events_are_grouped_by_what_their_rollouts_were_given(tmp_path: Path) -> None:
    def line(name: str, task: str, value: float) -> dict[str, Any]:
        events = [{**request([1, 2], [3]), "rollout_id": name}, {**reward(value), "rollout_id": name}]
        return {"rollout": {"rollout_id": name, "input": {"data_id": task}}, "events": events}

    path = tmp_path / "x.events.jsonl"
    lines = [line("a", "t1", 1.0), line("b", "t2", 0.0), line("c", "t1", 0.0)]
    loose = [
        {**request([5], [6]), "rollout_id": "d"},
        {"event_type": "reward", "rollout_id": "e", "data": {"value": 1}},
    ]
    path.write_text("\n".join(json.dumps(each) for each in (*lines, *loose)))
    done = convert_files([str(path)], str(tmp_path / "out.jsonl"))
    found = [json.loads(each) for each in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [each["group"] for each in found] == ["t1", "t1", "t2", "d"] and [each.get("rewards") for each in found] == [
        1,
        0,
        0,
        None,
    ]
    assert dict(done.lost.unread) == {"rollout without a model request": 1}
