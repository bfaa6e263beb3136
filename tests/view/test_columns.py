"""One table of columns: whatever a micro-batch carries is exported, read back, compared and shown."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.arrays import Ragged, Sample
from penstock.arrays.columns import TABLE as GIVEN
from penstock.arrays.columns import Cells, Column
from penstock.errors import ConfigError
from penstock.packing import MicroBatch, pack
from penstock.train.terms import Terms
from penstock.view import Export, TokenExporter
from penstock.view.diff import compare
from penstock.view.jsonl import Jsonl
from penstock.view.library import Library
from penstock.view.parquet import ParquetFile
from penstock.view.record import COLUMNS, FIELDS, OF_SAMPLE, TABLE, ExportColumn
from penstock.view.step_files import Format
from tests.support.exports import terms_of

LENGTH = 6
FORMATS: list[Format] = [Jsonl, ParquetFile]


def made(column: Column) -> Any:
    """Values for a column that differ from token to token and from what stands where nothing was given."""
    shape = (LENGTH, *[3, 2][: column.trailing])
    kind = np.dtype(column.dtypes[-1]).kind
    if column.name == "mm_token_type_ids":
        return None  # images would have to be there too
    if column.ragged:
        return Ragged.of_lists([range(n, 2 * n) for n in range(1, LENGTH + 1)])
    if kind == "b":
        return [False] + [True] * (LENGTH - 1)
    if column.trailing and kind == "f":
        return -np.arange(1, 1 + np.prod(shape)).reshape(shape) / 8
    if kind == "f":
        return -np.linspace(0.5, 1, LENGTH) if column.at_most < 1 else np.linspace(0.5, 1, LENGTH)
    return np.arange(1, 1 + np.prod(shape)).reshape(shape)


def batch_with_everything(**changes: Any) -> MicroBatch:
    columns = {column.name: made(column) for column in GIVEN if column.per != "sample"}
    sample = Sample(id="a", group="g", env="e", **{**columns, **changes})
    (batch,) = pack([sample], ranks=1, seq_len=16, pad_to_multiple_of=8).ranks[0]
    types = np.array([0, 1, 1, 2, 0, 0, 0, 0], np.uint8)
    return dataclasses.replace(batch, columns={**batch.columns, "mm_token_type_ids": types})


def export(folder: Path, batch: MicroBatch, **options: Any) -> Export:
    with TokenExporter(folder, **options) as exporter:
        exporter.write(1, batch, terms_of(np.random.default_rng(0), batch))
        exporter.close_step(1)
    return Export(folder)


def test_the_export_has_every_column_of_the_table_and_every_term() -> None:
    assert {c.attribute for c in TABLE if c.source == "batch"} == {
        "position_ids",
        *(column.name for column in GIVEN if column.per != "sample"),
    }
    assert {column.name for column in OF_SAMPLE.values()} == {c.name for c in GIVEN if c.per == "sample"}
    assert set(OF_SAMPLE) <= set(FIELDS)
    per_token = {field.name for field in dataclasses.fields(Terms)} - {"parts", "rules", "trained"}
    assert {c.attribute for c in TABLE if c.source == "terms"} == per_token


@pytest.mark.parametrize("file_format", FORMATS)
def test_every_column_comes_back_with_its_values_and_its_shape(tmp_path: Path, file_format: Format) -> None:
    batch = batch_with_everything()
    (record,) = export(tmp_path, batch, file_format=file_format).step(1).records()
    for column in (one for one in TABLE if one.source == "batch"):
        expected, found = batch[column.attribute][:LENGTH], record.columns[column.name]
        if column.ragged:
            assert found.tolist() == expected.tolist() and found.dtype == expected.dtype, column.name
            continue
        assert found.shape == expected.shape and found.dtype.kind == expected.dtype.kind, column.name
        known = np.isfinite(found)
        assert known.any() and (found[known] == expected[known]).all(), column.name


@pytest.mark.parametrize("column", [one for one in TABLE if one.source == "batch" and one.kind != "bool"])
def test_a_difference_in_any_column_is_found(tmp_path: Path, column: ExportColumn) -> None:
    batch = batch_with_everything()
    if column.ragged:
        lists = batch[column.attribute].tolist()
        changed: Cells = Ragged.of_lists([*lists[:3], [*lists[3], 99], *lists[4:]])
    else:
        changed = np.array(batch[column.attribute])
        changed[3] = changed[3] + 1
    other = dataclasses.replace(batch, columns={**batch.columns, column.attribute: changed})
    runs = [export(tmp_path / name, one) for name, one in (("a", batch), ("b", other))]
    difference = compare(*runs)
    assert (difference.what, difference.token, difference.column) == ("token", 3, column.name)
    assert difference.values is not None and difference.values[0] != difference.values[1]
    json.dumps(dataclasses.asdict(difference))


def test_values_of_another_shape_are_a_difference(tmp_path: Path) -> None:
    wide, narrow = (batch_with_everything(routed_experts=np.ones((LENGTH, 3, k), np.uint8)) for k in (4, 2))
    difference = compare(export(tmp_path / "a", wide), export(tmp_path / "b", narrow))
    assert (difference.token, difference.column) == (0, "routed_experts")


def test_the_viewer_is_sent_every_column(tmp_path: Path) -> None:
    library = Library(exports={"x": export(tmp_path, batch_with_everything())})
    record = json.loads(bytes(library.sample("x", "", 1, 0)["record"]))
    assert set(COLUMNS) | set(FIELDS) == set(record)
    assert record["routed_experts"][1] == [[7, 8], [9, 10], [11, 12]]


def test_columns_can_be_left_out_and_unknown_ones_are_named(tmp_path: Path) -> None:
    (record,) = export(tmp_path, batch_with_everything(), omit=("routed_experts", "entropy")).step(1).records()
    assert not {"routed_experts", "entropy"} & set(record.columns) and "mm_token_type_ids" in record.columns
    for name in ("nope", "token_ids"):
        with pytest.raises(ConfigError, match=f"omit: {name}; a record can do without inference_logprobs, "):
            TokenExporter(tmp_path, omit=(name,))


@pytest.mark.parametrize("file_format", FORMATS)
def test_rows_with_routed_experts_of_two_shapes_share_a_file(tmp_path: Path, file_format: Format) -> None:
    """Models of two runs have other numbers of layers; a sample may have none."""
    shapes = [(3, 2), (5, 4), None]
    with TokenExporter(tmp_path, file_format=file_format) as exporter:
        for shape in shapes:
            experts = None if shape is None else np.ones((LENGTH, *shape), np.uint8)
            batch = batch_with_everything(routed_experts=experts)
            exporter.write(1, batch, terms_of(np.random.default_rng(0), batch))
        exporter.close_step(1)
    found = [record.columns.get("routed_experts") for record in Export(tmp_path).step(1).records()]
    assert [None if one is None else one.shape[1:] for one in found] == shapes


ADDED = """
import json, sys
import numpy as np
from pathlib import Path
from penstock.arrays import Sample, Samples
from penstock.frames import decode, encode
from penstock.packing import pack
from tests.support.exports import terms_of
from penstock.view import Export, TokenExporter
from penstock.view.diff import compare
from penstock.view.parquet import ParquetFile
from penstock.view.library import Library

def exported(folder, values, **options):
    sample = Sample(
        id="a", token_ids=[1, 2, 3], loss_mask=[0, 1, 1], logprobs=[0, -1, -1], advantages=1.0, surprise=values
    )
    (sample,) = decode(encode([sample]))
    (batch,) = pack([sample], ranks=1, seq_len=8).ranks[0]
    with TokenExporter(folder, **options) as exporter:
        exporter.write(1, batch, terms_of(np.random.default_rng(0), batch))
        exporter.close_step(1)
    return Export(folder)

root = Path(sys.argv[1])
values = [0.5, 0.25, 0.125]
lines, rows = exported(root / "a", values), exported(root / "b", values, file_format=ParquetFile)
other = exported(root / "c", [0.5, 0.25, 9.0])
read = [export.step(1).records() for export in (lines, rows)]
print(json.dumps({
    "read": [[record.columns["surprise"].tolist() for record in records] for records in read],
    "shown": json.loads(bytes(Library(exports={"x": lines}).sample("x", "", 1, 0)["record"]))["surprise"],
    "same": compare(lines, rows).what,
    "parts": [compare(lines, other).token, compare(lines, other).column],
}))
"""


@pytest.mark.process
def test_a_column_added_in_one_line_travels_all_the_way(tmp_path: Path) -> None:
    """A copy of the package with one line more in `arrays/columns.py`, from a sample to the viewer."""
    package = tmp_path / "changed" / "penstock"
    shutil.copytree(Path(penstock.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    table = package / "arrays" / "columns.py"
    line = '    _token("surprise", "<f4", 0.0, 0.0, "how unlikely the token looked"),\n'
    text = table.read_text()
    start = "TABLE: tuple[Column, ...] = (\n"
    assert text.count(start) == 1
    table.write_text(text.replace(start, start + line))
    ran = subprocess.run(
        [sys.executable, "-c", ADDED, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(package.parent)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert json.loads(ran.stdout) == {
        "read": [[[0.5, 0.25, 0.125]]] * 2,
        "shown": [0.5, 0.25, 0.125],
        "same": "same",
        "parts": [2, "surprise"],
    }
