"""Samples of slime and miles, as records and as torch files; nothing in them runs."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.convert import make_group
from penstock.errors import CorruptFile, InvalidInput
from penstock.integrations.formats.file_formats import convert_files
from penstock.integrations.formats.slime_samples import from_slime, slime_trajectory, to_slime
from tests.integrations.foreign_samples import SAMPLE, samples_of


@dataclass
class SlimeSample:
    """What of slime's `Sample` is read, by its names."""

    tokens: list[int]
    response_length: int
    group_index: int | None = 4
    index: int | None = 9
    prompt: str = "2+2"
    response: str = "4"
    label: str | None = None
    reward: Any = 1.0
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: Any = None
    rollout_top_p_token_offsets: Any = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    status: str = "completed"
    metadata: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


FULL = SlimeSample(
    tokens=[1, 2, 3, 4, 5],
    response_length=3,
    loss_mask=[1, 0, 1],
    rollout_log_probs=[-0.5, 0.0, -0.25],
    rollout_top_p_token_ids=torch.tensor([3, 9, 5], dtype=torch.int32),
    rollout_top_p_token_offsets=torch.tensor([0, 2, 2, 3], dtype=torch.int32),
    rollout_routed_experts=torch.arange(8, dtype=torch.int32).reshape(4, 1, 2),
    weight_versions=["4", "3"],
)


def test_a_slime_sample_is_read_with_everything_along_its_response() -> None:
    sample = from_slime(FULL)
    assert sample.id == "4/9" and sample.group == "4" and sample.policy_version == 3
    assert sample.loss_mask.tolist() == [False, False, True, False, True]
    assert sample["logprobs"].tolist() == [0, 0, -0.5, 0, -0.25]
    assert sample["sampling_mask"].tolist() == [[], [], [3, 9], [], [5]]
    assert sample["routed_experts"][:, 0].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], [0, 0]]


def test_torch_files_of_slime_and_miles_are_read_and_nothing_in_them_runs(tmp_path: Path) -> None:
    as_miles = {**FULL.to_dict(), "rollout_routed_experts": np.arange(8, dtype=np.int32).reshape(4, 1, 2)}
    path = tmp_path / "rollout_7.pt"
    torch.save({"rollout_id": 7, "samples": [FULL.to_dict(), as_miles]}, path)
    done = convert_files([str(path)], str(tmp_path / "out.penstock"))
    one, other = ps.decode((tmp_path / "out.penstock").read_bytes())
    assert one == other.replace(id=one.id) and one.group == "7/4"
    assert done.lost.as_dict()["unread"] == {"prompt": 2}
    torch.save({"rollout_id": 7, "samples": [FULL]}, path)
    with pytest.raises(CorruptFile, match="only tensors, arrays and plain values are loaded"):
        convert_files([str(path)], str(tmp_path / "other.penstock"))
    assert not (tmp_path / "other.penstock").exists()


def test_what_penstock_writes_is_loaded_by_torch_as_slime_wants_it(tmp_path: Path) -> None:
    (tmp_path / "in.penstock").write_bytes(ps.encode([SAMPLE, SAMPLE.replace(id="g/1")]))
    done = convert_files([str(tmp_path / "in.penstock")], str(tmp_path / "out.pt"))
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    first, second = loaded["samples"]
    known = {each.name for each in fields(SlimeSample)} | {"teacher_log_probs"}
    assert set(first) <= known and first["group_index"] == second["group_index"] and second["index"] == 1
    assert first["loss_mask"] == [1, 0, 1] and len(first["rollout_log_probs"]) == first["response_length"] == 3
    assert dict(done.lost.unwritten) == {"advantages": 2}  # slime makes them of the rewards


def test_failed_truncated_and_removed_rollouts_of_slime_keep_what_they_say() -> None:
    records = [
        SlimeSample(tokens=[1, 2, 3], response_length=2, status=status).to_dict() for status in ("failed", "truncated")
    ]
    failed, truncated = map(slime_trajectory, records)
    assert failed.error == "failed" and truncated.truncated and truncated.error is None
    group = make_group([truncated, slime_trajectory({**records[1], "reward": 0.0, "status": "completed"})], id="g")
    assert [float(sample["advantages"]) for sample in group.samples] == [0.5, -0.5]
    assert from_slime({**records[1], "remove_sample": True}).loss_tokens == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"reward": {"acc": 1.0, "fmt": 0.0}}, r"reward: a mapping with 'acc', 'fmt'; name one with reward_key"),
        ({"reward": "1"}, "reward: '1'; must be a number"),
        ({"response_length": 9}, "response_length: 9 of 5 tokens"),
        ({"rollout_log_probs": [0.0]}, r"rollout_log_probs: 1 values for a response of 3 tokens"),
        ({"loss_mask": [1]}, "loss_mask: 1 values for a response of 3"),
        ({"rollout_routed_experts": [[[1]]]}, r"rollout_routed_experts: shape \(1, 1, 1\) for 5 tokens"),
        ({"response_length": 5, "loss_mask": None, "rollout_log_probs": None}, "nothing predicts a first token"),
    ],
)
def test_a_slime_record_that_cannot_be_taken_names_its_line_and_field(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    plain = {"tokens": [1, 2, 3, 4, 5], "response_length": 3, "loss_mask": [1, 0, 1], "rollout_log_probs": [-1, 0, -1]}
    path = tmp_path / "x.slime.jsonl"
    path.write_text("\n".join(json.dumps(each) for each in (plain, {**plain, **changes})))
    with pytest.raises(InvalidInput, match=rf"x.slime.jsonl:2: .*{said}"):
        samples_of(path)


def test_one_of_several_rewards_is_chosen_by_its_key() -> None:
    assert float(from_slime({**FULL.to_dict(), "reward": {"acc": 0.5, "fmt": 1}}, reward_key="acc")["rewards"]) == 0.5
    assert to_slime(SAMPLE, group_index=0, index=0)["reward"] == 1.0
