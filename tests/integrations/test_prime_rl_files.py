"""Micro-batches of prime-rl, as files that its trainers of several months read."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import penstock as ps
from penstock.arrays import ImageSpan
from penstock.errors import CorruptFile, InvalidInput
from penstock.integrations.formats.file_formats import convert_files
from penstock.integrations.formats.prime_rl_batches import (
    PrimeBatch,
    PrimeRlWriter,
    encoded_tensors,
    image_refs,
    read_batches,
    to_prime_rl,
)
from tests.integrations.foreign_samples import SAMPLE, samples_of


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
    with pytest.raises(InvalidInput, match=r"sample 'g/0'.advantages: missing; prime-rl cannot train"):
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
        (lambda b: b"not msgpack", "not a micro-batch file"),
        (lambda b: msgspec.msgpack.encode([[1, 2]]), "not a micro-batch file"),
        (
            lambda b: msgspec.msgpack.encode([msgspec.structs.replace(b, advantages=[1.0])]),
            "advantages: 1 values for 5",
        ),
        (
            lambda b: msgspec.msgpack.encode([msgspec.structs.replace(b, sequence_lengths=[9])]),
            "sequence of 9 tokens for 5 ids",
        ),
        (
            lambda b: msgspec.msgpack.encode([msgspec.structs.replace(b, routed_experts=(b"", [5, 0, 0], "O"))]),
            "routed_experts: dtype 'O'; must be one of uint8",
        ),
        (lambda b: msgspec.msgpack.encode([msgspec.structs.replace(b, sampling_mask=[b"123", b""])]), "truncated"),
    ],
)
def test_a_file_that_prime_rl_did_not_write_is_named(tmp_path: Path, change: Any, said: str) -> None:
    [batch] = ps.pack([SAMPLE], ranks=1, seq_len=8).ranks[0]
    path = tmp_path / "rank_0.bin"
    path.write_bytes(change(to_prime_rl(batch)))
    with pytest.raises(CorruptFile, match=said) as error:
        samples_of(path)
    assert "rank_0.bin" in str(error.value)


def test_fields_of_prime_rl_stand_where_it_has_them() -> None:
    names = PrimeBatch.__struct_fields__
    assert names[:16] == tuple("multimodal" if name == "mm_kwargs" else name for name in EarlierBatch.__struct_fields__)
    assert names[16:] == ("sampling_mask", "trace_ids", "branch_indices")


@pytest.mark.parametrize("name", ["rollouts", "batches"])
def test_the_folder_of_a_trainer_is_found_by_either_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "outputs" / name).mkdir(parents=True)
    columns: dict[str, Any] = {"token_ids": [5, 6], "loss_mask": [0, 1], "logprobs": [0, -0.5], "advantages": 1.0}
    (tmp_path / "in.penstock").write_bytes(ps.encode([ps.Sample(id="a", env="math", **columns)]))
    convert_files([f"{tmp_path}/in.penstock"], f"{tmp_path}/outputs", target="prime-rl")
    assert (tmp_path / "outputs" / name / "step_1" / "rank_0.bin").is_file()
    assert convert_files([f"{tmp_path}/outputs"], f"{tmp_path}/back.jsonl").samples == 1
    with pytest.raises(InvalidInput, match="step_1: already exists"):
        convert_files([f"{tmp_path}/in.penstock"], f"{tmp_path}/outputs", target="prime-rl")
    (tmp_path / "outputs" / "rollouts").mkdir(exist_ok=True)
    (tmp_path / "outputs" / "batches").mkdir(exist_ok=True)
    with pytest.raises(InvalidInput, match="has batches and rollouts; give the one that the trainer reads"):
        convert_files([f"{tmp_path}/outputs"], f"{tmp_path}/other.jsonl")
