"""Files that unfold to more than they hold, and names in them that a terminal would act on."""

from __future__ import annotations

import base64
import json
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.cli import main
from penstock.errors import CorruptFile, InvalidInput
from penstock.frames import decode
from penstock.integrations.formats.file_formats import convert_files
from penstock.integrations.formats.verl_tensors import from_verl
from penstock.view.parquet import read_parquet

torch = pytest.importorskip("torch")
SLIME = {"tokens": [1, 2], "response_length": 1, "reward": 1.0, "group_index": 0, "index": 0}


def convert(path: Path) -> Any:
    return convert_files([str(path)], str(path.with_suffix(".penstock")))


def test_an_expanded_tensor_is_rejected_before_it_is_copied(tmp_path: Path) -> None:
    path = tmp_path / "bomb.pt"
    experts = torch.zeros(1, dtype=torch.int32).expand(1, 100_000_000)
    torch.save({"rollout_id": 0, "samples": [SLIME | {"rollout_routed_experts": experts}]}, path)
    assert path.stat().st_size < 10_000
    with pytest.raises(CorruptFile, match="a tensor of 400,000,000 bytes with 4 bytes of data"):
        convert(path)
    torch.save({"rollout_id": 0, "samples": [SLIME | {"tokens": torch.tensor([1, 2])}]}, path)
    assert convert(path).samples == 1


def test_a_compressed_torch_file_is_rejected_unread(tmp_path: Path) -> None:
    plain, path = tmp_path / "plain.pt", tmp_path / "packed.pt"
    torch.save({"rollout_id": 0, "samples": [SLIME | {"tokens": torch.zeros(1_000_000, dtype=torch.int64)}]}, plain)
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    with pytest.raises(CorruptFile, match="compressed"):
        convert(path)


def test_a_zip_file_that_claims_to_span_disks_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "odd.pt"
    torch.save({"rollout_id": 0, "samples": [SLIME]}, path)
    whole = path.read_bytes()
    end = whole.rindex(b"PK\5\6")
    locator = b"PK\6\7" + (1).to_bytes(4, "little") + bytes(8) + (9).to_bytes(4, "little")
    path.write_bytes(whole[:end] + locator + whole[end:])
    with pytest.raises(CorruptFile, match="span multiple disks"):
        convert(path)


@pytest.mark.parametrize("sample", [7, "x", None, [1]])
def test_a_sample_that_is_none_is_named(tmp_path: Path, sample: object) -> None:
    path = tmp_path / "odd.pt"
    torch.save({"rollout_id": 0, "samples": [sample]}, path)
    with pytest.raises(InvalidInput, match="must be a Sample"):
        convert(path)


def test_a_batch_of_single_values_is_rejected() -> None:
    with pytest.raises(InvalidInput, match="responses is a single value"):
        from_verl({"prompts": np.zeros((1, 2)), "responses": np.array(3)})
    with pytest.raises(InvalidInput, match="prompts: rows of different lengths"):
        from_verl({"prompts": [[1], [1, 2]], "responses": [[2], [3]]})


def test_what_is_printed_of_data_is_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "odd.slime.jsonl"
    path.write_text(json.dumps(SLIME | {"\x1b]0;owned\x07": 1, "a\u202eb": 2}) + "\n")
    assert main(["convert", str(path), str(tmp_path / "out.penstock")]) == 0
    shown = capsys.readouterr().out
    assert "\\x1b]0;owned\\x07" in shown and "\\u202e" in shown
    assert all(c.isprintable() or c == "\n" for c in shown)


def test_an_error_that_quotes_data_is_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path / "a\x1b[31m\u202eb")]) == 1
    shown = capsys.readouterr().err
    assert "\\x1b[31m" in shown and all(c.isprintable() or c == "\n" for c in shown)


def convert_lines(tmp_path: Path, record: object, source: str) -> Any:
    path = tmp_path / "odd.jsonl"
    path.write_text(json.dumps(record) + "\n")
    return convert_files([str(path)], str(tmp_path / "out.jsonl"), source=source, target="jsonl")


@pytest.mark.parametrize("text", ["9" * 5000, "0" * 5000 + "7" * 20])
def test_versions_of_more_digits_than_python_converts_are_rejected(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidInput, match=r"odd\.jsonl:1"):
        convert_lines(tmp_path, SLIME | {"weight_versions": [text]}, "slime")
    answer = {"prompt_token_ids": [1], "response_token_ids": [2], "model_version": text}
    event = {"rollout_id": "r", "event_type": "model_request", "data": answer}
    with pytest.raises(InvalidInput, match=r"weight_versions\[0\].version: '[09]{59}; must be a whole number"):
        convert_lines(tmp_path, event, "agent-lightning")


@pytest.mark.parametrize("dtype", ["i1,,,", "(((", "O", "9" * 5000, "(1000000000,)i8"])
def test_dtypes_of_strangers_are_rejected(tmp_path: Path, dtype: str) -> None:
    packed = {"__nd__": True, "data": "xx", "dtype": dtype, "shape": [2]}
    with pytest.raises(InvalidInput, match="a packed array that cannot be read"):
        convert_lines(tmp_path, SLIME | {"tokens": packed}, "slime")
    sample = {"token_ids": [1, 2], "columns": {"mine": [dtype, "token", 0, False, 0, 0]}, "mine": [1, 2]}
    with pytest.raises(InvalidInput, match="column 'mine': dtype"):
        convert_lines(tmp_path, sample, "jsonl")


def numpy_file(header: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()


@pytest.mark.parametrize(
    "data",
    [
        numpy_file("{'descr': '<i8', 'fortran_order': False, 'shape': (100000000000,), }\n"),
        numpy_file("{'descr': '<i8'" + "(" * 3000),
        b"PK\3\4" + bytes(99),
    ],
)
def test_routed_experts_that_are_no_numpy_file_are_rejected(tmp_path: Path, data: bytes) -> None:
    answer = {"prompt_token_ids": [1], "response_token_ids": [2]}
    event = {
        "rollout_id": "r",
        "event_type": "model_request",
        "data": answer | {"routed_experts": base64.b64encode(data).decode()},
    }
    with pytest.raises(InvalidInput, match="must be a numpy array in base64"):
        convert_lines(tmp_path, event, "agent-lightning")


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("responses", np.array([[6, 7]], "M8[s]")),
        ("responses", np.zeros((1, 2, 2))),
        ("responses", np.array(["x"])),
        ("routed_experts", np.array(["x"])),
        ("min_global_steps", np.array([[1, 2]])),
        ("min_global_steps", np.array(["\x1b[31m"])),
        ("temperature", np.broadcast_to(np.zeros((), "S1"), 10**11)),
    ],
)
def test_a_batch_with_arrays_of_another_form_is_rejected(name: str, array: Any) -> None:
    batch = {"prompts": [[0, 5]], "responses": [[6, 7]], "attention_mask": [[0, 1, 1, 1]]}
    with pytest.raises(InvalidInput):
        from_verl({key: np.array(value) for key, value in batch.items()} | {name: array})


@pytest.mark.parametrize(
    "tensor",
    [
        torch.sparse_coo_tensor(torch.tensor([[0]]), torch.tensor([1.0]), (10**9,), check_invariants=True),
        torch.zeros(2, dtype=torch.bfloat16),
        torch.zeros(2, dtype=torch.complex64).conj(),
    ],
)
def test_tensors_that_numpy_does_not_have_are_rejected(tmp_path: Path, tensor: Any) -> None:
    path = tmp_path / "odd.pt"
    torch.save({"rollout_id": 0, "samples": [SLIME | {"tokens": tensor}]}, path)
    with pytest.raises((InvalidInput, CorruptFile), match=r"odd\.pt"):
        convert(path)


def test_lists_in_themselves_or_a_thousand_times_in_each_other_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "odd.pt"
    loop: list[Any] = []
    loop.append(loop)
    many: list[Any] = [1] * 1000
    for _ in range(2):
        many = [many] * 1000
    shared = torch.zeros(1_000_000, dtype=torch.int32)
    for tokens, problem in (
        (loop, "in themselves"),
        (many, "8,000,000,0.. bytes in a file of"),
        ([shared] * 2000, "8,000,000,0.. bytes in a file of"),
    ):
        torch.save({"rollout_id": 0, "samples": [SLIME | {"tokens": tokens}]}, path)
        with pytest.raises(CorruptFile, match=problem):
            convert(path)


def test_whatever_a_reader_raises_is_one_sentence_with_the_file(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "rank_0.bin"
    path.write_bytes(msgspec.msgpack.encode([[[2**63], [True], [1.0], [0.0], [2**63], [1], [1.0], ["e"], [1]]]))
    assert main(["convert", str(path), str(tmp_path / "out.jsonl"), "--from", "prime-rl"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"penstock convert: {path} micro-batch 0: ") and said.count("\n") == 1


def test_an_error_is_cut_where_it_would_fill_the_screen(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_text(json.dumps({"token_ids": [1, 2], "rewards": "A" * 100_000}) + "\n")
    assert main(["convert", str(path), str(tmp_path / "out.penstock")]) == 1
    said = capsys.readouterr().err
    assert "characters left out" in said and len(said) < 5000


def test_no_samples_become_a_frame_that_can_be_decoded(tmp_path: Path) -> None:
    path = tmp_path / "none.jsonl"
    path.write_bytes(b"")
    assert convert(path).samples == 0
    frame = path.with_suffix(".penstock")
    assert len(decode(frame.read_bytes())) == 0
    assert convert_files([str(frame)], str(tmp_path / "again.jsonl")).samples == 0


def test_a_parquet_file_that_unfolds_to_gigabytes_is_rejected_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal numbers cost nothing: 826 bytes of a file took 4 GB."""
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr("penstock.view.parquet.MAX_GROUP_BYTES", 1 << 20)
    tokens = pa.ListArray.from_arrays(pa.array([0, 300_000], pa.int32()), pa.array(np.zeros(300_000, np.uint32)))
    path = tmp_path / "bomb.parquet"
    parquet.write_table(pa.table({"id": ["a"], "token_ids": tokens}), path)
    assert path.stat().st_size < 2000
    with pytest.raises(CorruptFile, match="row group 0 would unfold to 1,200,"):
        convert(path)
    with pytest.raises(CorruptFile, match="row group 0 would unfold to 1,200,"):
        next(read_parquet(path))


def test_a_safetensors_file_without_data_is_rejected_unread(tmp_path: Path) -> None:
    path, size = tmp_path / "sparse.safetensors", 5 << 30
    head = json.dumps({"prompts": {"dtype": "U8", "shape": [1, size], "data_offsets": [0, size]}}).encode()
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + size)
    with pytest.raises(CorruptFile, match=f"the limit is {4 << 30}"):
        convert(path)
