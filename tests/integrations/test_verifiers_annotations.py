"""What the trainer made of every token stands on the messages of the package's own traces."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import verifiers.v1 as vf

import penstock as ps
from penstock.capture import from_verifiers
from penstock.cli import main
from penstock.errors import InvalidInput
from penstock.integrations.environments.verifiers_annotations import annotate_trace, index_records
from penstock.packing import MicroBatch
from penstock.train import Dppo, Terms
from penstock.view import Export
from tests.capture.test_verifiers import branching_trace, record

pytestmark = [pytest.mark.deep, pytest.mark.filterwarnings("ignore")]
Change = Callable[[dict[str, Any]], object]


def terms_of(batch: MicroBatch) -> Terms:
    """What a loss says of a micro-batch: here the trainer's log-probabilities are the token ids over -100."""
    tensors = ps.to_torch(batch)
    logprobs = -tensors["token_ids"].float() / 100
    return Dppo()(tensors, logprobs, entropy=tensors["token_ids"].float())


def trained(folder: Path, *, seq_len: int = 64) -> list[dict[str, Any]]:
    """Two rollouts of a trace with two branches, trained for a step that is exported; returns their episodes."""
    episodes = []
    with (
        ps.open("memory:", ranks=1, seq_len=seq_len, groups_per_step=1, over_length="truncate") as plane,
        plane.source(rank=0) as source,
    ):
        with plane.group("p") as group:
            for number, reward in enumerate((1.0, 0.0)):
                episode = vf.WireEpisode.model_validate(record())
                episode.traces = [branching_trace()]
                episode.traces[0].record_reward("right", reward)
                episode.traces[0].info["penstock_sample"] = f"{group.id}/{number}"
                (rollout,) = from_verifiers(episode)
                group.add(rollout)
                episodes.append(episode.to_record(float_decimals=None))
        step = source.step(timeout=60)
        with ps.TokenExporter(folder, rank=0, world=1) as exporter:
            for batch in step:
                exporter.write(step, batch, terms_of(batch), policy_version=0)
            exporter.close_step(step)
    return episodes


def test_traces_carry_the_trainers_values_where_the_package_reads_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    episodes = trained(tmp_path / "run")
    traces = tmp_path / "traces"
    traces.mkdir()
    (traces / "traces.jsonl").write_text("".join(json.dumps(episode) + "\n" for episode in episodes))
    assert main(["rollouts", "annotate", str(traces), "--run", str(tmp_path / "run")]) == 0
    assert "2 traces annotated, " in capsys.readouterr().out
    lines = (traces / "traces.jsonl").read_text().splitlines()
    for line, advantage in zip(lines, (0.5, -0.5), strict=True):
        episode = vf.WireEpisode.model_validate(json.loads(line))
        for branch in episode.traces[0].branches:
            ids, mask = np.array(branch.token_ids), np.array(branch.sampled_mask)
            assert branch.trainer_logprobs == pytest.approx(np.where(mask, -ids / 100, 0.0))
            assert branch.entropies == pytest.approx(np.where(mask, ids, 0))
            assert branch.advantages == pytest.approx(np.where(mask, advantage, 0.0))
        # Every sampled token is trained once, or masked by the loss; none is counted for two branches.
        nodes = [node for node in episode.traces[0].nodes if node.sampled]
        weights = np.concatenate([np.array(node.loss_weights["rl"])[node.mask] for node in nodes])
        said = np.concatenate([np.array(node.token_ids)[node.mask] for node in nodes])
        expected = _kept(said, advantage, np.concatenate([node.logprobs for node in nodes]))
        assert weights.tolist() == expected


def _kept(ids: Any, advantage: float, logprobs: Any) -> list[float]:
    """1.0 where Dppo keeps the token."""
    delta = np.exp(-ids / 100) - np.exp(logprobs)
    masked = delta > 0.2 if advantage > 0 else delta < -0.2
    kept: list[float] = (~masked).astype(float).tolist()
    return kept


def test_a_live_trace_can_be_annotated(tmp_path: Path) -> None:
    episodes = trained(tmp_path)
    export = Export(tmp_path)
    index = index_records(record for step in export.steps("") for record in step.records())
    trace = vf.WireEpisode.model_validate(episodes[0]).traces[0]
    assert annotate_trace(trace, index) > 0
    assert trace.branches[0].trainer_logprobs is not None


def test_of_a_sample_that_was_cut_the_messages_behind_the_cut_stay_as_they_are(tmp_path: Path) -> None:
    episodes = trained(tmp_path, seq_len=7)  # after the first answer, inside the next question
    index = index_records(record for step in Export(tmp_path).steps("") for record in step.records())
    trace = vf.WireEpisode.model_validate(episodes[0]).traces[0]
    annotate_trace(trace, index)
    assert [node.trainer_logprobs is not None for node in trace.nodes if node.sampled] == [True, False, False]


def test_traces_of_another_run_are_left_alone_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (episode, _) = trained(tmp_path / "run")
    episode["traces"][0]["info"] = {}
    path = tmp_path / "other.jsonl"
    path.write_text(json.dumps(episode))
    assert main(["rollouts", "annotate", str(path), "--run", str(tmp_path / "run"), "--out", str(tmp_path / "o")]) == 0
    assert "0 traces annotated, 0 sampled tokens of 1 exported steps; 1 traces are in none" in capsys.readouterr().out
    assert json.loads((tmp_path / "o").read_text()) == episode


def test_tokens_that_are_not_those_of_the_trace_are_refused(tmp_path: Path) -> None:
    episodes = trained(tmp_path)
    index = index_records(record for step in Export(tmp_path).steps("") for record in step.records())
    trace = episodes[0]["traces"][0]
    trace["nodes"][1]["token_ids"][0] += 1
    with pytest.raises(InvalidInput, match="no path of its trace has its tokens"):
        annotate_trace(trace, index)


def test_a_file_that_is_not_there_or_not_json_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path / "run")
    assert main(["rollouts", "annotate", str(tmp_path / "none"), "--run", str(tmp_path / "run")]) == 1
    assert "no traces.jsonl;" in capsys.readouterr().err
    (tmp_path / "bad.jsonl").write_text("{}\nnot json\n")
    assert main(["rollouts", "annotate", str(tmp_path / "bad.jsonl"), "--run", str(tmp_path / "run")]) == 1
    assert "bad.jsonl:2: not JSON" in capsys.readouterr().err
    assert (tmp_path / "bad.jsonl").read_text() == "{}\nnot json\n"
    assert not list(tmp_path.glob(".*"))  # half a file beside it would stay for good


torch.set_num_threads(1)
