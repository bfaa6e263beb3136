"""Batches of verl and rollout samples of TRL, against their real types."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import penstock as ps
from penstock.convert import make_group
from penstock.errors import CorruptFile, InvalidInput
from penstock.integrations.formats.file_formats import convert_files
from penstock.integrations.formats.shared import Lost, to_trajectory
from penstock.integrations.formats.verl_tensors import from_verl, to_verl
from penstock.integrations.trainers.trl_rollouts import from_trl, to_trl
from tests.integrations.foreign_samples import SAMPLE, samples_of

pytestmark = pytest.mark.deep


def test_a_rollout_sample_of_trl_is_made_and_read() -> None:
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    made = to_trl(SAMPLE, group_id=7)
    assert isinstance(made, RolloutSample)
    assert made.input_ids.dtype == np.int64 and made.old_log_probs.dtype == np.float32
    back = from_trl(made, id="g/0")
    assert back == SAMPLE.replace(group="7", env="")
    assert from_trl(asdict(made), id="g/0") == back
    with pytest.raises(InvalidInput, match="one advantage"):
        to_trl(SAMPLE.replace(advantages=[0, 0, 1, 0, 2]), group_id=0)
    with pytest.raises(InvalidInput, match="sample 'g/0': rl_weights other than 1; TRL trains all its tokens"):
        to_trl(SAMPLE.replace(rl_weights=[0, 0, 1, 0, 0.5]), group_id=0)


def test_a_batch_of_verl_is_padded_as_its_documentation_draws_it() -> None:
    short = ps.Sample(
        id="g/1", group="g", token_ids=[7, 8], loss_mask=[0, 1], logprobs=[0, -1], rewards=0.0, advantages=0.0
    )
    batch = to_verl([SAMPLE, short])
    assert batch["prompts"].tolist() == [[1, 2], [0, 7]] and batch["responses"].tolist() == [[3, 4, 5], [8, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [0, 1, 1, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4], [0, 0, 1, 0, 0]]
    assert batch["response_mask"].tolist() == [[1, 0, 1], [1, 0, 0]]
    assert batch["rm_scores"].tolist() == [[0, 0, 1], [0, 0, 0]] and batch["uid"].tolist() == ["g", "g"]
    assert from_verl(batch) == [SAMPLE, short]


def test_tensordicts_padded_or_nested_are_read_as_arrays_are() -> None:
    arrays = to_verl([SAMPLE])
    tensors = {name: torch.from_numpy(values) for name, values in arrays.items() if values.dtype.kind != "U"}
    [sample] = from_verl(TensorDict(tensors, batch_size=[1]))
    assert sample == SAMPLE.replace(id="/0", group="", env="")

    class DataProto:
        """As verl has it: tensors in one place, everything else in another."""

        batch = TensorDict(tensors, batch_size=[1])
        non_tensor_batch = {name: values.astype(object) for name, values in arrays.items() if values.dtype.kind == "U"}  # noqa: RUF012

    assert from_verl(DataProto()) == [SAMPLE]
    rows = {
        "prompts": torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([7])], layout=torch.jagged),
        "responses": torch.nested.nested_tensor([torch.tensor([3, 4, 5]), torch.tensor([8])], layout=torch.jagged),
        "response_mask": torch.nested.nested_tensor([torch.tensor([1, 0, 1]), torch.tensor([1])], layout=torch.jagged),
    }
    one, other = from_verl(rows)
    assert one.token_ids.tolist() == [1, 2, 3, 4, 5] and one.loss_mask.tolist() == [False, False, True, False, True]
    assert other.token_ids.tolist() == [7, 8]


def test_the_temperature_of_a_batch_or_of_its_rows_is_kept() -> None:
    class DataProto:
        batch, non_tensor_batch = None, to_verl([SAMPLE, SAMPLE])
        meta_info = {"temperature": 0.7, "global_steps": 3}  # noqa: RUF012

    hot = from_verl(DataProto())
    assert [float(sample["temperatures"]) for sample in hot] == [pytest.approx(0.7)] * 2
    mixed = [hot[0], hot[1].replace(temperatures=1.5)]
    batch = to_verl(mixed)
    assert batch["temperature"].tolist() == [pytest.approx(0.7), 1.5] and from_verl(batch) == mixed
    assert from_verl({**batch, "temperature": 0.5})[1]["temperatures"] == 0.5
    lost = Lost()
    assert "temperatures" not in from_verl({**batch, "temperature": [0, 1]}, lost=lost)[0]
    assert lost.unread["temperature"] == 1, "greedy"


def test_scores_on_several_tokens_stay_where_they_are() -> None:
    batch = {**to_verl([SAMPLE]), "rm_scores": np.array([[0.5, 0, 1]], np.float32)}
    assert from_verl(batch)[0]["rewards"].tolist() == [0, 0, 0.5, 0, 1]


@pytest.mark.parametrize("name", ["b.npz", "b.safetensors"])
def test_verl_batches_are_read_from_files_without_pickle(tmp_path: Path, name: str) -> None:
    (tmp_path / "in.penstock").write_bytes(ps.encode([SAMPLE]))
    convert_files([str(tmp_path / "in.penstock")], str(tmp_path / name))
    assert samples_of(tmp_path / name) == [SAMPLE]


def test_a_pickled_batch_is_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "b.npz"
    np.savez(path, prompts=np.array([{"a": 1}], object))
    with pytest.raises(CorruptFile, match="a pickled DataProto is not opened"):
        samples_of(path)
    torch.save({"prompts": torch.zeros(1)}, tmp_path / "b.safetensors")
    with pytest.raises(CorruptFile, match=r"b.safetensors: .*give tensors in"):
        samples_of(tmp_path / "b.safetensors")


def test_a_batch_without_what_it_needs_says_what() -> None:
    with pytest.raises(InvalidInput, match="no responses; a batch has prompts and responses, it has prompts"):
        from_verl({"prompts": [[1]]})
    with pytest.raises(InvalidInput, match="row 0: no attention_mask"):
        from_verl({"prompts": [[1]], "responses": [[2]]})


def test_a_sample_becomes_a_trajectory_whose_advantages_are_made_anew() -> None:
    rows = [to_trajectory(SAMPLE.replace(rewards=value)) for value in (1.0, 0.0)]
    group = make_group(rows, id="g")
    assert [float(sample["advantages"]) for sample in group.samples] == [0.5, -0.5]
    assert group.samples[0].token_ids.tolist() == SAMPLE.token_ids.tolist()
    assert group.samples[0]["logprobs"].tolist() == SAMPLE["logprobs"].tolist() and group.policy_version == 3
