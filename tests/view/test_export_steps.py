"""A step's files of several ranks, runs and attempts: when it is finished, and what a restart takes back."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from penstock.packing import pack
from penstock.view import Export, TokenExporter
from penstock.view.folders import read_done
from tests.view.exporting import batch_of, export, sample, terms_for


def test_each_rank_has_its_own_file_and_stable_comes_with_the_last(tmp_path: Path) -> None:
    batch = batch_of(sample("a", 5))
    marker = tmp_path / "token_exports/step_1/STABLE"
    exporters = [TokenExporter(tmp_path, rank=rank, world=3) for rank in range(3)]
    for exporter in exporters:
        exporter.write(1, batch, terms_for(batch))
    for exporter in (exporters[2], exporters[0]):
        exporter.close_step(1)
        exporter.flush()
        assert not marker.exists()
    exporters[1].close_step(1)
    exporters[1].flush()
    assert marker.read_bytes() == b""
    assert sorted(Export(tmp_path).step(1).files()) == [0, 1, 2]
    for exporter in exporters:
        exporter.close()


def test_with_a_barrier_close_step_returns_when_the_step_is_stable(tmp_path: Path) -> None:
    barrier = threading.Barrier(2)
    batch = batch_of(sample("a", 5))
    seen = []

    def rank(number: int) -> None:
        with TokenExporter(tmp_path, rank=number, world=2, barrier=barrier.wait) as exporter:  # type: ignore[arg-type]
            exporter.write(1, batch, terms_for(batch))
            exporter.close_step(1)
            seen.append((tmp_path / "token_exports/step_1/STABLE").exists())

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True, True]


def test_nothing_is_visible_before_close_step(tmp_path: Path) -> None:
    batch = batch_of(sample("a", 5))
    exporter = TokenExporter(tmp_path)
    exporter.write(1, batch, terms_for(batch))
    exporter.flush()
    assert [path.name for path in (tmp_path / "token_exports/step_1").iterdir() if path.name[0] != "."] == []
    exporter.close()
    assert Export(tmp_path).steps() == []


def test_a_restart_takes_back_the_marker_and_keeps_the_finished_file_beside(tmp_path: Path) -> None:
    export(tmp_path, batch_of(sample("old", 5)), attempt="1")
    folder = tmp_path / "token_exports/step_1"
    before = (folder / "rank_0.jsonl").read_bytes()
    exporter = TokenExporter(tmp_path, attempt="2")
    batch = batch_of(sample("new", 5))
    exporter.write(1, batch, terms_for(batch))
    assert not (folder / "STABLE").exists() and (folder / "rank_0.jsonl").read_bytes() == before
    exporter.close_step(1)
    exporter.close()
    assert [record.label for record in Export(tmp_path).step(1).records()] == ["new"]
    assert (folder / "rank_0.jsonl.1").read_bytes() == before


def test_a_dummy_takes_back_the_marker_too(tmp_path: Path) -> None:
    """A rank may have nothing else in a step; what it said of it in an earlier attempt must not stand."""
    step = pack([sample("a", 5)], ranks=2, seq_len=8)
    for rank, own in enumerate(step.ranks):
        export(tmp_path, *own, rank=rank, world=2)
    (dummy,) = step.ranks[1]
    assert dummy.is_dummy and len(Export(tmp_path).steps()) == 1
    with TokenExporter(tmp_path, rank=1, world=2) as exporter:
        exporter.write(1, dummy, terms_for(dummy))
        assert Export(tmp_path).steps() == []


def test_a_rank_of_an_attempt_before_does_not_complete_a_step(tmp_path: Path) -> None:
    batch = batch_of(sample("a", 5))
    for rank in range(2):
        export(tmp_path, batch, rank=rank, world=2, attempt="1")
    assert [step.number for step in Export(tmp_path).steps()] == [1]
    export(tmp_path, batch, rank=0, world=2, attempt="2")
    assert Export(tmp_path).steps() == []
    export(tmp_path, batch, rank=1, world=2, attempt="2")
    assert [step.number for step in Export(tmp_path).steps()] == [1]


def test_files_of_ranks_that_no_longer_exist_are_not_read(tmp_path: Path) -> None:
    for rank in range(3):
        export(tmp_path, batch_of(sample(f"old{rank}", 5)), rank=rank, world=3, attempt="1")
    export(tmp_path, batch_of(sample("new", 5)), rank=0, world=1, attempt="2")
    assert [record.label for record in Export(tmp_path).step(1).records()] == ["new"]


def test_a_run_step_that_spans_trainer_steps_survives_a_restart_between_them(tmp_path: Path) -> None:
    first, second = (batch_of(sample(name, 5, run="r")) for name in "ab")
    exporter = TokenExporter(tmp_path)
    exporter.write(4, first, terms_for(first), run_step=2)
    exporter.write(5, second, terms_for(second), run_step=2)
    exporter.close()  # as a crash leaves it, with one half-written record
    part = tmp_path / "r/token_exports/step_2/.rank_0.jsonl.part"
    part.write_bytes(part.read_bytes()[:-7])
    with TokenExporter(tmp_path) as exporter:
        exporter.write(5, second, terms_for(second), run_step=2)
        exporter.close_step(5, runs={"r": 2})
    records = list(Export(tmp_path).step(2, run="r").records())
    assert [(record.fields["step"], record.label) for record in records] == [(4, "a"), (5, "b")]
    assert [record.fields["export_step"] for record in records] == [2, 2]
    done = read_done(tmp_path / "r/token_exports/step_2", 0)
    assert done is not None and done.summary is not None and done.summary.records == 2


def test_runs_go_to_their_own_folders_and_every_rank_closes_all_of_them(tmp_path: Path) -> None:
    step = pack([sample("a", 5, run="x"), sample("b", 5, run="y")], ranks=2, seq_len=8)

    class Numbered:
        number = 3
        totals = step.totals

    for rank, own in enumerate(step.ranks):
        with TokenExporter(tmp_path, rank=rank, world=2) as exporter:
            for batch in own:
                exporter.write(Numbered(), batch, terms_for(batch))
            exporter.close_step(Numbered())
    export = Export(tmp_path)
    assert export.runs == ["x", "y"]
    for run, name in (("x", "a"), ("y", "b")):
        assert [record.label for record in export.step(3, run=run).records()] == [name]


@pytest.mark.parametrize("run", ["../up", "..", "exp 7 \u00e9", "a%2Fb", "\u202e", "x" * 500, "-r", "(evaluation)"])
def test_no_run_name_leaves_the_folder_or_stops_the_trainer(tmp_path: Path, run: str) -> None:
    batch = batch_of(sample("a", 5, run=run))
    with TokenExporter(tmp_path / "in") as exporter:
        exporter.write(1, batch, terms_for(batch))
        exporter.close_step(1, runs={run: 1})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]
    [folder] = [path.parent for path in (tmp_path / "in").glob("*/token_exports")]
    export = Export(tmp_path / "in")
    assert export.runs == [folder.name if "~" in folder.name else run]
    for name in export.runs:
        assert [record.label for record in export.step(1, name).records()] == ["a"]
