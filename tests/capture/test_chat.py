from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.capture import from_arrays, from_chat_completions, from_choices
from penstock.convert import to_samples
from penstock.errors import InvalidInput


def entries(ids: list[int], *, named: str = "token") -> list[dict[str, Any]]:
    return [
        {named: i if named == "token_id" else f"token_id:{i}", "logprob": -0.125 * (n + 1)} for n, i in enumerate(ids)
    ]


def response(prompt: list[int], ids: list[int], **more: Any) -> dict[str, Any]:
    """A chat completion with token ids asked for."""
    choice = {"token_ids": ids, "finish_reason": "stop", "logprobs": {"content": entries(ids)}, **more}
    return {"prompt_token_ids": prompt, "choices": [choice]}


EXPECTED = ([1, 2, 3, 4], [False, False, True, True], [0.0, 0.0, -0.125, -0.25])


def as_expected(rollout: Any) -> bool:
    [sample] = to_samples(rollout)
    return (sample.token_ids.tolist(), sample.loss_mask.tolist(), sample["logprobs"].tolist()) == EXPECTED


def test_chat_completions_completions_and_generate_read_alike() -> None:
    chat = response([1, 2], [3, 4])
    completions = {
        "choices": [
            {"prompt_token_ids": [1, 2], "token_ids": [3, 4], "logprobs": {"token_logprobs": [-0.125, -0.25]}}
        ]
    }  # fmt: skip
    generate = {"choices": [{"token_ids": [3, 4], "logprobs": {"content": entries([3, 4], named="token_id")}}]}
    ids_in_logprobs = {"prompt_token_ids": [1, 2], "choices": [{"logprobs": {"content": entries([3, 4])}}]}
    assert as_expected(from_chat_completions([chat]))
    assert as_expected(from_chat_completions([completions]))
    assert as_expected(from_chat_completions([generate], prompts=[[1, 2]]))
    assert as_expected(from_chat_completions([ids_in_logprobs]))


def test_response_objects_read_like_mappings() -> None:
    content = [SimpleNamespace(**entry) for entry in entries([3, 4])]
    choice = SimpleNamespace(token_ids=[3, 4], finish_reason="length", logprobs=SimpleNamespace(content=content))
    rollout = from_chat_completions([SimpleNamespace(prompt_token_ids=[1, 2], choices=[choice])])
    assert as_expected(rollout)
    assert rollout.truncated and rollout.stop_condition == "length"


def test_a_conversation_folds_into_one_sample() -> None:
    rollout = from_chat_completions([response([1, 2], [3]), response([1, 2, 3, 5], [6])], reward=1.0)
    [sample] = to_samples(rollout)
    assert sample.token_ids.tolist() == [1, 2, 3, 5, 6]
    assert sample.loss_mask.tolist() == [False, False, True, False, True]


def test_weight_versions_become_one_per_token() -> None:
    spans = [{"version": 7, "start": 0, "end": 1}, {"version": "8", "start": 1, "end": 3}]
    answer = {**response([1], [2, 3, 4]), "weight_versions": spans}
    [sample] = to_samples(from_chat_completions([answer]))
    assert sample["weight_versions"].tolist() == [7, 7, 8, 8]
    assert sample.policy_version == 7


def test_one_version_throughout_needs_no_column() -> None:
    answer = versions([2, 3], 9, 0, 2)
    [sample] = to_samples(from_chat_completions([answer]), policy_version=3)
    assert "weight_versions" not in sample
    assert sample.policy_version == 9


def test_a_completion_with_no_token_is_a_turn_with_none() -> None:
    answer = response([1, 2, 3, 4], [])
    rollout = from_chat_completions([response([1, 2], [3]), answer])
    assert rollout.num_turns == 2
    [sample] = to_samples(rollout)
    assert sample.token_ids.tolist() == [1, 2, 3, 4]


def logprob(value: Any) -> dict[str, Any]:
    return response([1], [5], logprobs={"content": [{"token": "token_id:5", "logprob": value}]})


def versions(ids: list[int], version: Any, start: int, end: int) -> dict[str, Any]:
    return response([1], ids, weight_versions=[{"version": version, "start": start, "end": end}])


def token(**named: Any) -> dict[str, Any]:
    return response([1], [5], logprobs={"content": [{**named, "logprob": -1.0}]})


BAD: list[tuple[Any, str]] = [
    ({}, "choices: missing"),
    ({"choices": []}, "choices: 0; a trajectory follows one"),
    ({"choices": [{}, {}]}, "choices: 2; a trajectory follows one"),
    ({"choices": "x"}, "choices: a str"),
    ({"prompt_token_ids": [1], "choices": [{"logprobs": None}]}, r"choices\[0\].token_ids: missing"),
    ({"choices": [{"token_ids": [1], "logprobs": None}]}, "prompt_token_ids: missing"),
    (response([1], [5], logprobs={"content": entries([5, 6])}), "logprobs: 2 values for 1 completion tokens"),
    (response([1], [5], logprobs={"content": []}), "logprobs: 0 values for 1 completion tokens"),
    (response([1], [5], logprobs={"content": None}), "logprobs.token_logprobs: missing"),
    (response([1], [5], logprobs={"token_logprobs": [None]}), "logprobs.token_logprobs: dtype object"),
    (response([1], [5], logprobs=None), "logprobs: missing for 1 tokens"),
    (logprob(-9999.0), r"logprobs\[0\]: -9999"),
    (logprob(None), r"logprobs.content\[0\].logprob: None"),
    (logprob("x"), r"logprobs.content\[0\].logprob: 'x'"),
    (logprob(float("-inf")), "logprobs: sampled token 0 is -inf"),
    (logprob(1.0), "logprobs: sampled token 0 is 1"),
    (token(token="token_id:6"), r"logprobs.content\[0\].token_id: 6, but the completion has 5"),
    (token(token_id=6), r"logprobs.content\[0\].token_id: 6, but the completion has 5"),
    (token(token="token_id:x"), r"logprobs.content\[0\].token_id: 'x'"),
    (token(token_id="5"), r"logprobs.content\[0\].token_id: '5'"),
    (response([1], [-5]), r"choices\[0\].token_ids\[0\]: -5"),
    (versions([5], 1, 0, 2), r"weight_versions\[0\]: tokens 0 to 2"),
    (versions([5, 6], 1, 0, 1), "weight_versions: cover 1 of 2"),
    (versions([5], "v", 0, 1), r"weight_versions\[0\].version: 'v'"),
    (versions([5], 1, 1, 1), r"weight_versions\[0\]: tokens 1 to 1"),
]  # fmt: skip


@pytest.mark.parametrize(("bad", "message"), BAD, ids=[m[:45] for _, m in BAD])
def test_a_bad_response_rejects_the_rollout_whole(bad: Any, message: str) -> None:
    good = response([1, 2], [3])
    before = copy.deepcopy([good, bad])
    with pytest.raises(InvalidInput, match=r"trajectory 'x' responses\[1\].*" + message):
        from_chat_completions([good, bad], id="x")
    assert repr([good, bad]) == repr(before)


def test_prompts_are_given_one_per_response() -> None:
    with pytest.raises(InvalidInput, match="prompts: 2 for 1 responses"):
        from_chat_completions([response([1], [2])], prompts=[[1], [2]])


def test_plain_arrays_become_turns_at_the_edges_of_the_mask() -> None:
    columns: dict[str, Any] = {"temperatures": 0.5, "ce_weights": [0.0, 0.0, 1.0, 0.0, 0.0]}
    rollout = from_arrays([1, 2, 3, 4, 5], [0, 1, 0, 1, 1], logprobs=[-1, -2, -3], columns=columns)
    assert rollout.num_turns == 2
    [sample] = to_samples(rollout)
    assert sample.loss_mask.tolist() == [False, True, True, True, True]
    assert sample["rl_weights"].tolist() == [1, 1, 0, 1, 1]
    assert sample["logprobs"].tolist() == [0, -1, 0, -2, -3]
    assert float(sample["temperatures"]) == 0.5


def test_plain_arrays_of_different_lengths_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"trajectory 'x'.mask: 2 values for 3 tokens"):
        from_arrays([1, 2, 3], [0, 1], id="x")
    with pytest.raises(InvalidInput, match=r"trajectory 'x'.logprobs: 2 values for 1 sampled of 3 tokens"):
        from_arrays([1, 2, 3], [0, 0, 1], logprobs=[-1, -1], id="x")
    with pytest.raises(InvalidInput, match=r"trajectory.token_ids: empty"):
        from_arrays(np.zeros(0, np.uint32), np.zeros(0, np.bool_))


def test_every_choice_of_a_reply_is_a_rollout_of_its_group() -> None:
    reply = response([1, 2], [3, 4])
    reply["choices"] *= 3
    rollouts = from_choices(reply, rewards=[0.0, 0.5, 1.0], temperature=0.7, env="math")
    assert all(as_expected(rollout) for rollout in rollouts)
    assert [(r.reward, r.env) for r in rollouts] == [(0.0, "math"), (0.5, "math"), (1.0, "math")]
    [alone] = from_choices(response([1, 2], [3, 4]))
    assert alone.reward is None


def test_choices_of_a_reply_object_share_its_prompt_and_versions() -> None:
    content = [SimpleNamespace(**entry) for entry in entries([3, 4])]
    choice = SimpleNamespace(token_ids=[3, 4], finish_reason="stop", logprobs=SimpleNamespace(content=content))
    spans = [SimpleNamespace(version=1, start=0, end=1), SimpleNamespace(version=2, start=1, end=2)]
    reply = SimpleNamespace(prompt_token_ids=[1, 2], choices=[choice, choice], weight_versions=spans)
    for rollout in from_choices(reply):
        assert as_expected(rollout)
        assert [int(v) for v in to_samples(rollout)[0]["weight_versions"][2:]] == [1, 2]


def test_prompts_and_rewards_of_choices_are_checked() -> None:
    generate = {"choices": [{"token_ids": [3, 4], "logprobs": {"content": entries([3, 4])}}] * 2}
    assert all(as_expected(rollout) for rollout in from_choices(generate, prompt=[1, 2]))
    with pytest.raises(InvalidInput, match="return_token_ids=True"):
        from_choices(generate)
    with pytest.raises(InvalidInput, match="rewards: 1 for 2 choices"):
        from_choices(generate, prompt=[1, 2], rewards=[1.0])
    for rewards in (1.0, "10"):
        with pytest.raises(InvalidInput, match=r"rewards: .*; give a list with one number per choice"):
            from_choices(generate, prompt=[1, 2], rewards=rewards)  # type: ignore[arg-type]
