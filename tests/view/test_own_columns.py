"""Columns that only the test knows: from turns through a plane to tensors, export, comparison and viewer."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import penstock as ps
from penstock.arrays import COLUMNS as TABLE
from penstock.arrays import Ragged, Samples
from penstock.arrays.own_columns import RESERVED
from penstock.client import Source
from penstock.errors import ConfigError, CorruptFrame, InvalidInput
from penstock.frames.codings import Profile
from penstock.packing import MicroBatch, Packing, pack_with
from penstock.testing.strategies import OWN_COLUMNS, values_of
from penstock.view import Export, TokenExporter
from penstock.view.diff import compare
from penstock.view.jsonl import Jsonl
from penstock.view.library import Library
from penstock.view.parquet import ParquetFile
from penstock.view.record import COLUMNS, FIELDS
from penstock.view.step_files import Format
from tests.support.exports import terms_of
from tests.support.packable import packable

FORMATS: list[Format] = [Jsonl, ParquetFile]
MINE = [
    ps.Column("turn_weights", dtype="float32", per="token", fill=0.25),
    ps.Column("task", dtype="int64", per="sample", fill=-1),
    ps.Column("spans", dtype="uint16", ragged=True),
    ps.Column("features", dtype="float16", trailing=1, pad=9.0),
]


def put_group(plane: ps.Plane, name: str, **own: Any) -> None:
    with plane.group(name) as group:
        for reward in (0.0, 1.0):
            reply = ps.Turn([8, 9], logprobs=[-0.5, -0.25], columns=own)
            group.add(ps.Trajectory(turns=[ps.Turn([5, 6, 7]), reply], reward=reward))


def steps_of(plane: ps.Plane, ranks: int) -> list[list[MicroBatch]]:
    """One step, taken and committed by all ranks."""
    found: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    sources = [plane.source(rank=rank) for rank in range(ranks)]

    def take(source: Source, out: list[MicroBatch]) -> None:
        step = source.step()
        out.extend(step)
        source.commit(step)
        source.flush()
        source.close()

    threads = [threading.Thread(target=take, args=pair) for pair in zip(sources, found, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def export(folder: Path, batch: MicroBatch, **options: Any) -> Export:
    with TokenExporter(folder, **options) as exporter:
        exporter.write(1, batch, terms_of(np.random.default_rng(0), batch))
        exporter.close_step(1)
    return Export(folder)


def test_a_column_of_the_test_goes_from_a_turn_to_tensors_export_and_viewer(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    settings: dict[str, Any] = {"ranks": 2, "seq_len": 16, "groups_per_step": 2, "pad_to_multiple_of": 4}
    with ps.open(tmp_path / "run", columns=MINE, **settings) as plane:
        features = np.array([[1, 2], [3, 4]])
        put_group(plane, "with", turn_weights=[1.5, 2.5], task=7, spans=[[1, 2], []], features=features)
        put_group(plane, "without")
        (first,), (second,) = steps_of(plane, 2)
    for batch in (first, second):
        at = {
            name.split("#")[0]: int(start)
            for name, start in zip(batch.segments.ids, batch.segments.offsets, strict=True)
        }
        a, b = at["with"], at["without"]
        assert batch["turn_weights"][a : a + 5].tolist() == [0.25, 0.25, 0.25, 1.5, 2.5]
        assert batch["turn_weights"][b : b + 5].tolist() == [0.25] * 5
        assert (batch["task"][a : a + 5].tolist(), batch["task"][b : b + 5].tolist()) == ([7] * 5, [-1] * 5)
        assert batch["spans"][a : a + 5].tolist() == [[], [], [], [1, 2], []]
        assert batch["features"][a : a + 5].tolist() == [[0, 0]] * 3 + [[1, 2], [3, 4]]
        assert batch["features"][batch.sample_tokens :].tolist() == [[9, 9]] * batch.padding
        tensors = ps.to_torch(batch)
        assert tensors["turn_weights"].dtype == torch.float32 and tensors["features"].dtype == torch.float16
        assert tensors["spans_values"].tolist() == [1, 2] and len(tensors["spans_offsets"]) == batch.num_tokens + 1
    for file_format in FORMATS:
        found = export(tmp_path / file_format.suffix, first, file_format=file_format)
        with_it = next(r for r in found.step(1).records() if r.columns["task"][0] == 7)
        assert with_it.columns["turn_weights"].tolist() == [0.25, 0.25, 0.25, 1.5, 2.5]
        assert with_it.columns["turn_weights"].dtype == np.float32
        assert with_it.columns["spans"].tolist() == [[], [], [], [1, 2], []]
        assert with_it.columns["features"].tolist() == [[0, 0]] * 3 + [[1, 2], [3, 4]]
        library = Library(exports={"x": found})
        shown = [json.loads(bytes(library.sample("x", "", 1, i)["record"])) for i in range(2)]
        assert [0.25, 0.25, 0.25, 1.5, 2.5] in [record["turn_weights"] for record in shown]
    assert compare(Export(tmp_path / "jsonl"), Export(tmp_path / "parquet")).what == "same"


@settings(max_examples=15)
@given(samples=packable(most=4))
def test_what_is_exported_of_every_shape_is_what_the_micro_batch_has(
    tmp_path_factory: Any, samples: list[ps.Sample]
) -> None:
    packing = Packing(ranks=1, seq_len=8, pad_to_multiple_of=4, columns=OWN_COLUMNS)
    folder = tmp_path_factory.mktemp("own")
    for n, batch in enumerate(b for rank in pack_with(packing, samples).ranks for b in rank if "advantages" in b):
        for file_format in FORMATS:
            found = export(folder / f"{n}{file_format.suffix}", batch, file_format=file_format)
            for record in found.step(1).records():
                segment = batch.segments.ids.index(record.fields["sample_id"])
                start, count = int(batch.segments.offsets[segment]), int(batch.segments.lengths[segment])
                for name in record.own:
                    expected = batch[name][start : start + count]
                    _check(record.columns.get(name), expected, name)


def _check(found: Any, expected: Any, name: str) -> None:
    """NaN and what is infinite are null in an export; a column without a value is left out."""
    if isinstance(expected, Ragged):
        lists = Ragged.empty(len(expected), expected.dtype) if found is None else found
        assert lists.offsets.tolist() == expected.offsets.tolist(), name
        found, expected = lists.values, expected.values
    if found is None:
        assert expected.dtype.kind == "f" and not np.isfinite(expected).any(), name
        return
    assert found.dtype == expected.dtype and found.shape == expected.shape, name
    known = np.isfinite(expected)
    assert np.array_equal(found[known], expected[known]) and not np.isfinite(found[~known]).any(), name


def test_two_exports_part_where_an_own_column_differs(tmp_path: Path) -> None:
    made = []
    for name, last in (("a", 3.0), ("b", 4.0)):
        sample = ps.Sample(
            id="s",
            token_ids=[1, 2, 3],
            loss_mask=[0, 1, 1],
            logprobs=[0, -1, -1],
            advantages=1.0,
            columns={MINE[0]: [1.0, 2.0, last], MINE[2]: [[1], [2, 3], []]},
        )
        (batch,) = ps.pack([sample], ranks=1, seq_len=8, columns=MINE).ranks[0]
        made.append(export(tmp_path / name, batch))
    difference = compare(*made)
    assert (difference.token, difference.column, difference.values) == (2, "turn_weights", (3.0, 4.0))


def test_names_in_a_record_a_batch_and_a_turn_are_reserved() -> None:
    assert set(COLUMNS) | set(FIELDS) <= RESERVED | set(TABLE)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ps.Column("x", dtype="object"), "dtype 'object'; must be bool, or a number"),
        (lambda: ps.Column("x", dtype="<U8"), "must be bool, or a number"),
        (lambda: ps.Column("x", dtype="float128"), "must be bool, or a number"),
        (lambda: ps.Column("x", dtype="uint8", fill=-1), "fill -1; must be a number of uint8"),
        (lambda: ps.Column("x", dtype="int32", fill=0.5), "fill 0.5; must be a number of int32"),
        (lambda: ps.Column("x", per="sample", trailing=1), "trailing 1 per sample"),
        (lambda: ps.Column("x", ragged=True, trailing=1), "trailing 1 per token, ragged"),
        (lambda: ps.Column("x", trailing=3), "up to two trailing dimensions"),
        (lambda: ps.pack([], ranks=1, seq_len=4, columns=[ps.Column("logprobs")]), "the name is taken"),
        (lambda: ps.pack([], ranks=1, seq_len=4, columns=[ps.Column("entropy")]), "the name is taken"),
        (lambda: ps.pack([], ranks=1, seq_len=4, columns=[ps.Column("Nope!")]), "lower-case letters"),
        (lambda: ps.pack([], ranks=1, seq_len=4, columns=[ps.Column("x"), ps.Column("x")]), "declared twice"),
        (
            lambda: ps.pack([], ranks=1, seq_len=4, columns=[ps.Column("x", ragged=True), ps.Column("x_values")]),
            "'x' is ragged and becomes a tensor of that name",
        ),
    ],
)
def test_a_declaration_that_cannot_be_is_refused_in_words(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"x": [1.0]}, "x: 1 values for 3 tokens"),
        ({"x": ["a", "b", "c"]}, "must be bool, or a number"),
        ({"x": [object()] * 3}, "must be bool, or a number"),
        ({"x": [[1], [2]]}, "2 values for 3 tokens"),
        ({"token_ids": [1, 2, 3]}, "the name is taken"),
        ({MINE[1]: [1, 2, 3]}, "task: 1 dimensions; must have 0"),
        ({MINE[0]: [1e300, 0, 0]}, "too large for float32"),
        ({MINE[2]: [[-1], [], []]}, "must be from 0 to 65535"),
        ({MINE[2]: [[1], []]}, "2 lists for 3 tokens"),
    ],
)
def test_values_that_cannot_be_a_column_are_refused_in_words(columns: Any, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        ps.Sample(id="s", token_ids=[1, 2, 3], columns=columns)


def test_a_plane_refuses_what_it_was_not_told_of_and_what_is_declared_otherwise() -> None:
    sample = ps.Sample(id="g/0", group="g", token_ids=[1, 2], columns={"surprise": [1.0, 2.0]})
    other = ps.Sample(id="g/0", group="g", token_ids=[1, 2], columns={"task": [1, 2]})
    with ps.open("memory:", ranks=1, seq_len=16, groups_per_step=1, columns=MINE, untrained_groups="accept") as plane:
        with pytest.raises(InvalidInput, match=r"column 'surprise' .*was not declared"):
            plane.put([sample])
        with pytest.raises(InvalidInput, match=r"column 'surprise' .*does not know"):
            plane.put_frame("g", ps.encode([sample]))
        with pytest.raises(InvalidInput, match="task: 1 dimensions; must have 0"):
            plane.put([other])
        with pytest.raises(InvalidInput, match="column 'task' is int64 per token, fill 0, and this plane declares"):
            plane.put_frame("g", ps.encode([other]))
        assert plane.put([sample.replace(columns={"surprise": None, "task": 3})])


def test_a_plane_that_was_told_of_other_columns_trains_what_its_folder_holds(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"ranks": 1, "seq_len": 16, "groups_per_step": 1}
    with ps.open(tmp_path, columns=MINE[:1], **settings) as plane:
        put_group(plane, "one", turn_weights=[1.5, 2.5])
        put_group(plane, "two", turn_weights=[3.5, 4.5])
    changed = [ps.Column("turn_weights", dtype="float64")]
    with ps.open(tmp_path, columns=changed, **settings) as plane:
        put_group(plane, "three", turn_weights=[1.0, 1.0])
        kinds = {steps_of(plane, 1)[0][0]["turn_weights"].dtype.str for _ in range(2)}
        assert kinds == {"<f4"}  # groups that say different things of a column never share a step: the fewer wait apart
        assert [one["id"].split("#")[0] for one in plane.status()["quarantine"]] == ["three"]
    with (
        ps.open(tmp_path, **settings) as plane,
        pytest.raises(InvalidInput, match=r"'turn_weights' .* was not declared"),
    ):
        put_group(plane, "four", turn_weights=[1.0, 1.0])


def test_a_reader_that_was_not_told_of_a_column_keeps_it() -> None:
    rng = np.random.default_rng(0)
    samples = [
        ps.Sample(id=f"{i}", token_ids=range(n), columns={c: values_of(rng, c, n) for c in OWN_COLUMNS})
        for i, n in enumerate((1, 5, 40))
    ]
    profiles: tuple[Profile, ...] = ("fast", "small")
    for profile in profiles:
        back = ps.decode(ps.encode(samples, profile))
        assert back == Samples.of(samples)
        assert {name: repr(c.described()) for name, c in back.own.items()} == {
            c.name: repr(c.described()) for c in OWN_COLUMNS
        }


def test_samples_that_say_different_things_of_a_column_do_not_go_together() -> None:
    one = ps.Sample(id="a", token_ids=[1, 2], columns={"x": [1, 2]})
    other = ps.Sample(id="b", token_ids=[1, 2], columns={"x": [1.0, 2.0]})
    with pytest.raises(InvalidInput, match="column 'x' is int64 per token, fill 0 in one and float64 per token"):
        ps.encode([one, other])


def test_a_frame_that_describes_a_column_that_cannot_be_is_corrupt() -> None:
    from tests.frames.frames import forged, parts

    header, head, body = parts(ps.encode([ps.Sample(id="a", token_ids=[1, 2], columns={"x": [1.5, 2.5]})]))
    column = header[8][-1]
    assert column[0] == "x" and column[9] == ["token", 0.0, 0.0]
    for place, value in ((0, "entropy"), (0, "X"), (1, "|O"), (1, "<m8"), (9, ["never", 0, 0]), (9, ["token", "a", 0])):
        changed = [*column]
        changed[place] = value
        with pytest.raises(CorruptFrame):
            ps.decode(forged([*header[:8], [*header[8][:-1], changed], *header[9:]], head, body))
    unknown = [*column[:9], None]
    with pytest.raises(CorruptFrame, match="column 'x' is not one this reader knows"):
        ps.decode(forged([*header[:8], [*header[8][:-1], unknown], *header[9:]], head, body))
