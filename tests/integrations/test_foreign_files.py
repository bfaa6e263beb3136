"""Files and records of other trainers, against their real types where those can be installed, else by their shapes."""

from __future__ import annotations

import base64
import io
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tensordict import TensorDict

import penstock as ps
from penstock.arrays import ImageSpan
from penstock.convert import make_group
from penstock.errors import CorruptFile, InvalidInput
from penstock.integrations.agent_lightning import from_agent_lightning
from penstock.integrations.file_formats import convert_files
from penstock.integrations.prime_rl_batches import (
    PrimeBatch,
    PrimeRlWriter,
    encoded_tensors,
    image_refs,
    read_batches,
    to_prime_rl,
)
from penstock.integrations.responses import to_trajectory
from penstock.integrations.slime_samples import from_slime, slime_trajectory, to_slime
from penstock.integrations.trl_samples import from_trl, to_trl
from penstock.integrations.verl_tensors import from_verl, to_verl

COLUMNS: dict[str, Any] = {
    "loss_mask": [0, 0, 1, 0, 1],
    "logprobs": [0, 0, -0.5, 0, -0.25],
    "rewards": 1.0,
    "advantages": 0.5,
}
SAMPLE = ps.Sample(id="g/0", group="g", env="math", token_ids=[1, 2, 3, 4, 5], policy_version=3, **COLUMNS)


def samples_of(path: Path, **how: Any) -> list[ps.Sample]:
    convert_files([str(path)], str(path) + ".penstock", **how)
    return list(ps.decode(Path(f"{path}.penstock").read_bytes()))


# ------------------------------------------------------------------ prime-rl


class EarlierBatch(msgspec.Struct, array_like=True):
    """A micro-batch as trainers of August 2026 read it: the fields that there were then, by position."""

    input_ids: list[int]
    loss_mask: list[bool]
    advantages: list[float]
    inference_logprobs: list[float]
    position_ids: list[int]
    sequence_lengths: list[int]
    temperatures: list[float]
    env_names: list[str]
    seq_lens: list[int]
    ref_logprobs: list[float] | None = None
    routed_experts: tuple[bytes, list[int], str] | None = None
    mm_kwargs: dict[str, tuple[str, list[int], bytes]] | None = None
    mm_token_type_ids: list[int] | None = None
    rl_weights: list[float] | None = None
    ce_weights: list[float] | None = None
    ref_kl_weights: list[float] | None = None


def write_step(plane: ps.Plane, folder: Path, rank: int) -> Path:
    source = plane.source(rank=rank)
    step = source.step()
    path = PrimeRlWriter(folder, rank=rank).write(step)
    source.commit(step, policy_version=1)
    return path


def test_a_plane_s_steps_become_files_that_a_stock_trainer_of_prime_rl_reads(tmp_path: Path) -> None:
    with ps.open(tmp_path / "run", ranks=2, seq_len=16, groups_per_step=1, pad_to_multiple_of=4) as plane:
        plane.put([SAMPLE.replace(id=f"g/{i}", token_ids=range(i, i + 5)) for i in range(4)])
        with ThreadPoolExecutor(2) as ranks:  # a step is there when all ranks have it
            paths = list(ranks.map(partial(write_step, plane, tmp_path / "rollouts"), (0, 1)))
    assert paths == [tmp_path / "rollouts" / "step_1" / f"rank_{rank}.bin" for rank in (0, 1)]
    files = sorted((tmp_path / "rollouts" / "step_1").iterdir())
    assert [file.name for file in files] == ["rank_0.bin", "rank_1.bin"]
    batches = [msgspec.msgpack.decode(file.read_bytes(), type=list[EarlierBatch]) for file in files]
    assert len(batches[0]) == len(batches[1]) == 1
    for batch in (batch for rank in batches for batch in rank):
        aligned = ("loss_mask", "advantages", "inference_logprobs", "position_ids", "temperatures", "env_names")
        assert {len(getattr(batch, name)) for name in aligned} == {len(batch.input_ids)} == {12}
        assert batch.sequence_lengths == batch.seq_lens == [5, 7]  # the last one has the padding
        assert batch.position_ids == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1] and batch.env_names[-3:] == ["math", "", ""]
        assert batch.inference_logprobs[:5] == [0, 0, -0.5, 0, -0.25] and batch.rl_weights is None


def test_padding_and_dummies_of_a_file_are_no_samples(tmp_path: Path) -> None:
    step = ps.pack([SAMPLE], ranks=2, seq_len=8, pad_to_multiple_of=8)
    for rank in step.ranks:
        PrimeRlWriter(tmp_path, rank=rank.rank).write(rank, number=1)
    assert [len(read_batches(path)) for path in sorted((tmp_path / "step_1").iterdir())] == [1, 1]
    [found] = samples_of_folder(tmp_path)
    assert found.id == "g/0" and found.token_ids.tolist() == [1, 2, 3, 4, 5] and found.env == "math"
    assert float(found["advantages"]) == 0.5


def samples_of_folder(path: Path) -> list[ps.Sample]:
    out = path.parent / "out.penstock"
    convert_files([str(path)], str(out))
    return list(ps.decode(out.read_bytes()))


def test_terms_that_prime_rl_would_train_outside_the_mask_have_no_weight_there() -> None:
    sft = SAMPLE.replace(id="b", mode="sft", ce_weights=[1.0] * 5, logprobs=None, advantages=None)
    [batch] = ps.pack([sft], ranks=1, seq_len=8).ranks[0]
    made = to_prime_rl(batch)
    assert made.ce_weights == [0, 0, 1, 0, 1] and made.rl_weights == [0] * 5 and made.inference_logprobs == [0] * 5
    [unscored] = ps.pack([SAMPLE.replace(advantages=None)], ranks=1, seq_len=8).ranks[0]
    with pytest.raises(InvalidInput, match=r"sample 'g/0'.advantages: none; prime-rl cannot train it"):
        to_prime_rl(unscored)


def test_images_are_given_as_either_version_of_prime_rl_takes_them() -> None:
    span = ImageSpan(hash="0" * 64, grid=(1, 2, 2), offset=1, length=1)
    [batch] = ps.pack([SAMPLE.replace(images=[span])], ranks=1, seq_len=8).ranks[0]
    pixels = np.arange(8, dtype=np.float32).reshape(4, 2)
    made = to_prime_rl(batch, images=lambda _: encoded_tensors({"pixel_values": pixels}))
    [earlier] = msgspec.msgpack.decode(msgspec.msgpack.encode([made]), type=list[EarlierBatch])
    assert earlier.mm_kwargs is not None
    dtype, shape, data = earlier.mm_kwargs["pixel_values"]
    assert (dtype, shape) == ("float32", [4, 2]) and np.frombuffer(data, dtype).tolist() == list(range(8))
    refs = to_prime_rl(batch, images=lambda b: image_refs(b.images, lambda s: f"file:///{s.hash[:2]}")).multimodal
    assert refs == [[["file:///00", 1, 1]]]
    with pytest.raises(InvalidInput, match="1 images; pass images="):
        to_prime_rl(batch)


def test_sampling_masks_and_routing_are_bytes_as_prime_rl_has_them() -> None:
    full = SAMPLE.replace(sampling_mask=[[], [], [3, 9], [], [5]], routed_experts=np.arange(10).reshape(5, 1, 2))
    [batch] = ps.pack([full], ranks=1, seq_len=8).ranks[0]
    made = to_prime_rl(batch)
    assert made.sampling_mask is not None and made.routed_experts is not None
    ids, counts = (np.frombuffer(part or b"", "<i4").tolist() for part in made.sampling_mask)
    assert (ids, counts) == ([3, 9, 5], [0, 0, 2, 0, 1]) and made.routed_experts[1:] == ([5, 1, 2], "uint8")
    assert made.trace_ids == ["g/0"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda b: b"not msgpack", "not a file of micro-batches"),
        (lambda b: msgspec.msgpack.encode([[1, 2]]), "not a file of micro-batches"),
        (
            lambda b: msgspec.msgpack.encode([msgspec.structs.replace(b, advantages=[1.0])]),
            "advantages: 1 values for 5",
        ),
        (lambda b: msgspec.msgpack.encode([msgspec.structs.replace(b, sequence_lengths=[9])]), "sequences of 9 tokens"),
        (
            lambda b: msgspec.msgpack.encode([msgspec.structs.replace(b, routed_experts=(b"", [5, 0, 0], "O"))]),
            "routed_experts: dtype 'O'; must be one of uint8",
        ),
        (lambda b: msgspec.msgpack.encode([msgspec.structs.replace(b, sampling_mask=[b"123", b""])]), "cut short"),
    ],
)
def test_a_file_that_prime_rl_did_not_write_is_named(tmp_path: Path, change: Any, said: str) -> None:
    [batch] = ps.pack([SAMPLE], ranks=1, seq_len=8).ranks[0]
    path = tmp_path / "rank_0.bin"
    path.write_bytes(change(to_prime_rl(batch)))
    with pytest.raises(CorruptFile, match=said) as error:
        samples_of(path)
    assert "rank_0.bin" in str(error.value)


# ------------------------------------------------------------------ slime and miles


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
        ({"reward": {"acc": 1.0, "fmt": 0.0}}, r"reward: a mapping with 'acc', 'fmt'; say which one with reward_key"),
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


# ------------------------------------------------------------------ TRL


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


# ------------------------------------------------------------------ verl


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


# ------------------------------------------------------------------ Agent Lightning


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


# ------------------------------------------------------------------ and all of them


def test_a_sample_becomes_a_trajectory_whose_advantages_are_made_anew() -> None:
    rows = [to_trajectory(SAMPLE.replace(rewards=value)) for value in (1.0, 0.0)]
    group = make_group(rows, id="g")
    assert [float(sample["advantages"]) for sample in group.samples] == [0.5, -0.5]
    assert group.samples[0].token_ids.tolist() == SAMPLE.token_ids.tolist()
    assert group.samples[0]["logprobs"].tolist() == SAMPLE["logprobs"].tolist() and group.policy_version == 3


def test_fields_of_prime_rl_stand_where_it_has_them() -> None:
    names = PrimeBatch.__struct_fields__
    assert names[:16] == tuple("multimodal" if name == "mm_kwargs" else name for name in EarlierBatch.__struct_fields__)
    assert names[16:] == ("sampling_mask", "trace_ids", "branch_indices")
