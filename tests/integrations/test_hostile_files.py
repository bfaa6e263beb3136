"""Files that unfold to more than they hold, and names in them that a terminal would act on."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.cli import main
from penstock.errors import CorruptFile, InvalidInput
from penstock.integrations.formats.file_formats import convert_files
from penstock.integrations.formats.verl_tensors import from_verl

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
