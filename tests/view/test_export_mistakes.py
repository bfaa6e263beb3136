"""What an export says is what was trained, can be read back, and is one process's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock import Sample, pack, to_torch
from penstock.arrays.images import ImageSpan
from penstock.assets import AssetStore
from penstock.cli import main
from penstock.errors import Conflict, InvalidInput, MissingExtra
from penstock.integrations.formats.penstock_files import read_export
from penstock.integrations.formats.shared import Lost, Place
from penstock.train import mask_segments
from penstock.train.loss import ByMode, Dppo, Sft
from penstock.view import Export, TokenExporter
from penstock.view.jsonl import Jsonl
from penstock.view.parquet import ParquetFile, records_to_parquet
from penstock.view.step_files import Format
from tests.support.exports import make_export

SPAN = ImageSpan(hash="ab" * 32, grid=(1, 4, 6), offset=1, length=6, media_type="image/png", width=96, height=64)


def samples() -> list[Sample]:
    types = np.array([0, *([1] * 6), 0, 0], np.uint8)
    plain: dict[str, Any] = {
        "token_ids": np.arange(9),
        "loss_mask": np.arange(9) > 6,
        "logprobs": np.full(9, -0.5),
        "advantages": 1.0,
    }
    return [
        Sample(id="shown", group="g", mm_token_type_ids=types, images=[SPAN], **plain),
        Sample(id="lost", group="g", mm_token_type_ids=types, images=[SPAN], **plain),
    ]


@pytest.mark.parametrize("loss", [Dppo(), Sft(), ByMode()], ids=lambda loss: type(loss).__name__)
def test_a_sample_whose_image_is_lost_is_not_exported_as_trained(tmp_path: Path, loss: Dppo) -> None:
    with TokenExporter(tmp_path) as exporter:
        for number, batch in enumerate(pack(samples(), ranks=1, seq_len=32).ranks[0]):
            tensors = to_torch(batch)
            lost = [i for i, name in enumerate(batch.segments.ids) if name == "lost"]
            mask = mask_segments(batch["loss_mask"], batch.sequence_lengths, lost)
            tensors["loss_mask"] = torch.from_numpy(mask)
            exporter.write(1, batch, loss(tensors, torch.full((batch.num_tokens,), -0.6)))
            assert number < 2
        exporter.close_step(1)
    assert [record.fields["sample_id"] for record in Export(tmp_path).step(1).records()] == ["shown"]


def exported(folder: Path) -> Path:
    with TokenExporter(folder) as exporter:
        for batch in pack(samples(), ranks=1, seq_len=32).ranks[0]:
            exporter.write(1, batch, Sft()(to_torch(batch), torch.full((batch.num_tokens,), -0.6)))
        exporter.close_step(1)
    return next(folder.rglob("rank_0.jsonl"))


def test_an_export_with_images_is_read_back(tmp_path: Path) -> None:
    found = list(read_export(Place(str(exported(tmp_path))), Lost()))
    assert [sample.images for sample in sorted(found, key=lambda sample: sample.id)] == [(SPAN,), (SPAN,)]


def test_an_image_of_an_earlier_export_is_our_error(tmp_path: Path) -> None:
    path = exported(tmp_path)
    path.write_text(path.read_text().replace('"grid":[1,4,6],', ""))
    with pytest.raises(InvalidInput, match="an image without grid and merge, exported by an earlier version"):
        list(read_export(Place(str(path)), Lost()))


@pytest.mark.process
def test_two_exporters_of_one_rank_are_refused(tmp_path: Path) -> None:
    first = TokenExporter(tmp_path, rank=0, world=2)
    with pytest.raises(Conflict, match=r"another exporter of rank 0 \(this process\) writes here"):
        TokenExporter(tmp_path, rank=0, world=2)
    TokenExporter(tmp_path, rank=1, world=2).close()
    code = "import sys; from penstock.view import TokenExporter; TokenExporter(sys.argv[1], rank=0, world=2)"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "another exporter of rank 0 (process " in done.stderr
    first.close()
    TokenExporter(tmp_path, rank=0, world=2).close()


def test_penstock_tokens_fails_on_a_damaged_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = exported(tmp_path)
    assert main(["tokens", str(tmp_path)]) == 0
    path.write_bytes(path.read_bytes().replace(b'"lost"', b'"list"'))
    assert main(["tokens", str(tmp_path)]) == 1
    assert "rank_0.jsonl is not what its rank wrote" in capsys.readouterr().err


def test_row_groups_are_bounded_by_the_bytes_of_images(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow: pip install '.[parquet]'")
    from PIL import Image

    store = AssetStore(tmp_path / "assets")
    noise = np.random.default_rng(0).integers(0, 256, (1024, 1024, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.png")
    ref = store.put((tmp_path / "noise.png").read_bytes())
    make_export(tmp_path / "run", steps=1)
    step = Export(tmp_path / "run").step(1)
    records = list(step.records())[:12]
    for record in records:
        record.fields["images"] = [{"hash": ref.hash}]
    records_to_parquet(records, tmp_path / "out.parquet", images=store, max_image_bytes=1 << 30)
    with parquet.ParquetFile(tmp_path / "out.parquet") as file:
        groups = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    assert sum(groups) == len(records)
    assert max(groups) <= 3  # 3 MB each, 8 MiB a group


@pytest.mark.parametrize(("file_format", "extra"), [(Jsonl, "view"), (ParquetFile, "parquet")])
def test_a_missing_extra_is_named_before_the_first_step_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_format: Format, extra: str
) -> None:
    for module in [name for name in sys.modules if name.partition(".")[0] == file_format.needs]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(MissingExtra, match=rf"token export: needs {file_format.needs}; .*penstock-rl\[{extra}\]"):
        TokenExporter(tmp_path / "tokens", file_format=file_format)
    assert not (tmp_path / "tokens").exists()
