"""Exports that keep a part, wait, fail or are closed; what they count is what they wrote."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.errors import Closed, InvalidInput, StorageError
from penstock.train.terms import Terms
from penstock.view import EveryKth, Export, First, Keep, NoExport, TokenExporter, Worst
from penstock.view.folders import read_done
from tests.support.exports import make_export, terms_of
from tests.view.exporting import batch_of, export, lines_of, sample, terms_for


@pytest.mark.parametrize(
    ("keep", "names"), [(EveryKth(2), "ace"), (First(2), "ab"), (Worst(2), "bd"), (Worst(9), "abcde")]
)
def test_sampling_keeps_what_it_says_and_counts_the_rest(tmp_path: Path, keep: Keep, names: str) -> None:
    worst = {"a": 0.1, "b": 5.0, "c": 0.2, "d": 0.3, "e": 0.3}
    with TokenExporter(tmp_path, keep=keep) as exporter:
        for name, value in worst.items():
            batch = batch_of(sample(name, 4))
            exporter.write(1, batch, terms_for(batch, mismatch_kl=np.array([99.0, 0, value, 0])))
        exporter.close_step(1)
    assert "".join(line["sample_id"] for line in lines_of(tmp_path)) == names
    done = read_done(tmp_path / "token_exports/step_1", 0)
    assert done is not None and (done.records, done.skipped) == (len(names), 5 - len(names))
    assert done.summary is not None and done.summary.records == 5  # the summary is of everything trained


def test_the_size_limit_stops_writing_and_says_how_many_were_left_out(tmp_path: Path) -> None:
    batch = batch_of(sample("a", 60))
    export(tmp_path, *[batch] * 20, max_bytes=10_000)
    done = read_done(tmp_path / "token_exports/step_1", 0)
    assert done is not None and done.records + done.skipped == 20 and done.skipped > 0
    assert 10_000 <= done.num_bytes < 14_000


def test_only_every_nth_step_is_exported(tmp_path: Path) -> None:
    batch = batch_of(sample("a", 5))
    with TokenExporter(tmp_path, every=3) as exporter:
        for step in range(1, 8):
            exporter.write(step, batch, terms_for(batch))
            exporter.close_step(step)
    assert [step.number for step in Export(tmp_path).steps()] == [3, 6]


def test_a_disabled_exporter_has_the_same_interface_and_does_nothing(tmp_path: Path) -> None:
    batch = batch_of(sample("a", 5))
    with NoExport() as exporter:
        exporter.write(1, batch, terms_for(batch), policy_version=1)
        exporter.close_step(1, metrics={})
        exporter.flush()
    public = {name for name in dir(TokenExporter) if name[0] != "_"}
    assert public <= set(dir(NoExport)) and list(tmp_path.iterdir()) == []


def test_what_fails_in_the_writer_is_raised_by_the_next_call(tmp_path: Path) -> None:
    batch = batch_of(sample("a", 5))
    exporter = TokenExporter(tmp_path)
    exporter.write(1, batch, terms_for(batch))
    exporter.flush()
    folder = tmp_path / "token_exports/step_1"
    (folder / "rank_0.jsonl").mkdir()  # nothing can be renamed onto a folder
    exporter.close_step(1)
    with pytest.raises(StorageError, match="token export"):
        exporter.flush()
    with pytest.raises(StorageError):
        exporter.write(2, batch, terms_for(batch))
    with pytest.raises(StorageError):
        exporter.close()
    assert not (folder / "STABLE").exists()


def test_writing_to_a_closed_step_or_exporter_is_an_error(tmp_path: Path) -> None:
    batch = batch_of(sample("a", 5))
    exporter = TokenExporter(tmp_path)
    exporter.close_step(1)
    with pytest.raises(InvalidInput, match="step 1 of run '' was closed"):
        exporter.write(1, batch, terms_for(batch))
    exporter.close()
    with pytest.raises(Closed):
        exporter.write(2, batch, terms_for(batch))


def test_later_changes_to_the_tensors_do_not_reach_the_export(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    batch = batch_of(sample("a", 5))
    logprobs = torch.full((1, 5), -0.5)
    with TokenExporter(tmp_path) as exporter:
        exporter.write(1, batch, Terms(loss=logprobs, trainer_logprobs=logprobs))
        logprobs.fill_(-9.0)
        batch["advantages"][:] = 9.0
        exporter.close_step(1)
    (line,) = lines_of(tmp_path)
    assert line["trainer_logprobs"] == [None] + [-0.5] * 4 and line["advantages"] == [1.0] * 5


def test_the_summary_of_markers_equals_the_summary_of_records(tmp_path: Path) -> None:
    from penstock.view.tallies import NOTHING, tally

    make_export(tmp_path, steps=1, ranks=2, groups=5, size=2)
    step = Export(tmp_path).step(1)
    merged = NOTHING
    for done in step.done().values():
        assert done.summary is not None
        merged = merged.plus(done.summary)
    exact, read = merged.as_dict(), tally(step.records()).as_dict()
    for name in ("records", "tokens", "loss_tokens", "masked", "compared_tokens"):
        assert exact[name] == read[name]
    assert exact["mismatch_kl"] == pytest.approx(read["mismatch_kl"])
    assert exact["reward"] == pytest.approx(read["reward"])


def test_a_full_queue_makes_write_wait_and_loses_nothing(tmp_path: Path) -> None:
    batch = batch_of(*[sample(str(i), 30) for i in range(20)])
    rng = np.random.default_rng(0)
    with TokenExporter(tmp_path, queue_batches=1) as exporter:
        for _ in range(50):
            exporter.write(1, batch, terms_of(rng, batch))
        exporter.close_step(1)
    assert len(lines_of(tmp_path)) == 1000
