"""Several runs in one folder, and how fast each step was: nothing left out in silence, nothing off by a factor."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from penstock.cli import main
from penstock.errors import InvalidInput
from penstock.packing import pack
from penstock.view import Export, TokenExporter
from penstock.view.diff import compare
from penstock.view.library import Library, run_point
from penstock.view.static_page import make_page
from tests.support.exports import Words, make_export, samples_of_step, terms_of


@pytest.fixture
def two_runs(tmp_path: Path) -> Path:
    for run, steps in (("alpha", 1), ("beta", 2)):
        make_export(tmp_path / "both", steps=steps, ranks=1, groups=1, size=1, run=run)
    return tmp_path / "both"


def test_where_there_are_several_runs_none_is_chosen_in_silence(two_runs: Path) -> None:
    export = Export(two_runs)
    for ask in (export.steps, lambda: export.step(1), lambda: compare(export, export)):
        with pytest.raises(InvalidInput, match=r"2 runs, 'alpha', 'beta'; choose one with run= \(--run\)"):
            ask()
    with pytest.raises(InvalidInput, match="2 runs, 'alpha', 'beta'"):
        make_page(Library(exports={"both": export}))
    assert [step.number for step in export.steps("beta")] == [1, 2]
    assert [run["run"] for run in Library(exports={"both": export}).overview()["exports"][0]["runs"]] == export.runs


def test_a_rank_with_nothing_but_a_dummy_makes_no_run_of_its_own(tmp_path: Path) -> None:
    samples = samples_of_step(np.random.default_rng(0), Words(), 1, groups=1, size=1)
    packed = pack([sample.replace(run="r") for sample in samples], ranks=2, seq_len=512)
    assert [batch.is_dummy for own in packed.ranks for batch in own] == [False, True]
    for rank, own in enumerate(packed.ranks):
        with TokenExporter(tmp_path, rank=rank, world=2) as exporter:
            for batch in own:
                exporter.write(1, batch, terms_of(np.random.default_rng(0), batch))
            exporter.close_step(1, runs={"r": 1})
    export = Export(tmp_path)
    assert export.runs == ["r"] and not (tmp_path / "token_exports").exists()
    assert [one.is_dummy for mark in export.step(1).done().values() for one in mark.micro_batches] == [False, True]


def test_tokens_command_shows_every_run(two_runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokens", str(two_runs)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["run", "step"]
    assert [line.split()[:2] for line in lines] == [["alpha", "1"], ["beta", "1"], ["beta", "2"]]
    assert main(["tokens", str(two_runs), "--step", "2", "--json"]) == 0
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert [(step["run"], step["step"]) for step in steps] == [("beta", 2)]
    assert main(["tokens", str(two_runs), "--run", "alpha"]) == 0
    assert capsys.readouterr().out.splitlines()[0].split()[0] == "step"
    assert main(["tokens", str(two_runs), "--step", "9"]) == 1


def test_diff_command_names_the_runs_to_choose_from(two_runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(two_runs), str(two_runs)]) == 1
    assert "2 runs, 'alpha', 'beta'; choose one with run= (--run)" in capsys.readouterr().err
    assert main(["diff", str(two_runs), str(two_runs), "--run", "beta"]) == 0


def test_tokens_per_second_count_one_step_whatever_is_exported(tmp_path: Path) -> None:
    packed = pack(samples_of_step(np.random.default_rng(0), Words(), 1, groups=1, size=2), ranks=1, seq_len=512)
    before, after = {}, {}
    with TokenExporter(tmp_path, every=3) as exporter:
        for number in range(1, 7):
            for batch in packed.ranks[0]:
                exporter.write(number, batch, terms_of(np.random.default_rng(number), batch))
            before[number] = time.monotonic()
            exporter.close_step(number)
            after[number] = time.monotonic()
    for step in Export(tmp_path).steps():
        seconds = step.done()[0].seconds
        assert seconds is not None
        assert before[step.number] - after[step.number - 1] <= seconds <= after[step.number] - before[step.number - 1]
        assert run_point(step)["tokens_per_s"] == pytest.approx(
            sum(batch.sample_tokens for batch in packed.ranks[0]) / seconds
        )


def test_how_long_a_step_took_is_not_known_when_the_one_before_was_not_closed(tmp_path: Path) -> None:
    with TokenExporter(tmp_path) as exporter:
        for number in (10, 20, 21):
            exporter.close_step(number)
    found = {step.number: step.done()[0].seconds for step in Export(tmp_path).steps()}
    assert found[10] is None and found[20] is None and found[21] is not None


def test_a_step_of_a_run_that_spans_steps_of_the_trainer_takes_as_long_as_they_do(tmp_path: Path) -> None:
    sample = samples_of_step(np.random.default_rng(0), Words(), 1, groups=1, size=1)[0].replace(run="r")
    (batch,) = pack([sample], ranks=1, seq_len=512).ranks[0]
    with TokenExporter(tmp_path) as exporter:
        exporter.close_step(3, runs={})
        began = time.monotonic()
        for number in (4, 5):
            exporter.write(number, batch, terms_of(np.random.default_rng(0), batch), run_step=2)
            exporter.close_step(number, runs={} if number == 4 else {"r": 2})
            if number == 4:
                between = time.monotonic()
    seconds = Export(tmp_path).step(2, "r").done()[0].seconds
    assert seconds is not None and seconds >= between - began
