"""verifiers' traces.jsonl as a format: the samples are those that the same episodes put."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from penstock.capture import from_verifiers
from penstock.cli import main
from penstock.convert import to_samples
from penstock.integrations.formats.file_formats import convert_files, read_samples
from penstock.integrations.formats.shared import Lost
from tests.capture.test_verifiers import record

pytestmark = pytest.mark.deep


def written(folder: Path) -> Path:
    """Two episodes of one group, as Penstock puts them, with a judge, a silent and a dropped trace."""
    path = folder / "traces.jsonl"
    lines = []
    for number in range(2):
        episode = record()
        trace = episode["traces"][0]
        trace["info"] = {"penstock_sample": f"word#1/{number}"}
        others = [copy.deepcopy(trace) for _ in range(3)]
        others[0]["agent"]["trainable"] = False
        others[1]["nodes"] = []
        others[2]["dropped"] = "no verdict"
        episode["traces"] += others
        lines.append(json.dumps(episode) + "\n")
    path.write_text("".join(lines))
    return path


def test_samples_have_the_names_and_groups_they_were_put_under(tmp_path: Path) -> None:
    path, lost = written(tmp_path), Lost()
    samples = list(read_samples(str(path), lost))
    assert [(sample.id, sample.group) for sample in samples] == [("word#1/0", "word#1"), ("word#1/1", "word#1")]
    [expected] = to_samples(from_verifiers(record())[0])
    for sample in samples:
        assert sample.columns.keys() == expected.columns.keys()
        assert sample.token_ids.tolist() == expected.token_ids.tolist()
        assert sample["logprobs"].tolist() == expected["logprobs"].tolist()
    assert lost.unread == {
        "trace of an agent that is not trained": 2,
        "trace without a message": 2,
        "trace dropped by the environment": 2,
    }


def test_the_file_is_recognised_and_advantages_can_be_made(tmp_path: Path) -> None:
    done = convert_files([str(written(tmp_path))], f"{tmp_path}/out.penstock")
    assert (done.sources, done.samples, done.groups) == (("verifiers",), 2, 1)


def test_episodes_of_others_are_grouped_by_task(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    path.write_text((json.dumps(record()) + "\n") * 2)
    groups = {sample.group for sample in read_samples(str(path), Lost())}
    assert len(groups) == 1 and groups != {""}


def test_a_file_can_be_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert main(["view", str(written(tmp_path)), "--html", str(page)]) == 0
    assert "word#1/1" in page.read_text()
    said = capsys.readouterr()
    assert "2 samples of" in said.err and "trace without a message (2)" in said.err
