"""Metrics, info, stop condition, seconds and roles of a rollout, from the trajectory to export and files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.arrays.rollout import Roles, read_rollout
from penstock.convert.branches import to_samples
from penstock.errors import CorruptFrame, InvalidInput
from penstock.frames import encode_group
from penstock.frames.metadata import check_group, metadata_of_pieces
from penstock.integrations.formats.file_formats import convert_files
from penstock.integrations.formats.sample_files import read_lines, write_lines
from penstock.integrations.formats.shared import Lost, Place, to_trajectory
from penstock.integrations.trainers.trl_rollouts import from_trl, rollout_fields
from penstock.plane.manifest import GroupSummaries
from penstock.view import Export, TokenExporter
from tests.support.exports import terms_of

KNOWN: dict[str, Any] = {
    "metrics": {"format": 0.5, "tools": 3},
    "info": {"task": "17", "note": "naïve\n\x7f"},
    "stop_condition": "max_turns",
    "truncated": True,
    "seconds": 3.25,
    "agent": "solver",
}


def rollout(**fields: Any) -> ps.Trajectory:
    turns = [ps.Turn([1, 2], role="user"), ps.Turn([3, 4], logprobs=[-0.5, -0.25], role="assistant")]
    return ps.Trajectory(**{"turns": turns, "reward": 1.0, **fields})


def test_a_sample_carries_what_is_known_of_its_rollout() -> None:
    [sample] = to_samples(rollout(**KNOWN), id="a")
    [again] = ps.decode(ps.encode([sample]))
    assert again == sample
    found = read_rollout(again.rollout)
    assert {name: getattr(found, name) for name in KNOWN} == KNOWN
    assert found.roles is not None and list(found.roles) == [("user", 2), ("assistant", 2)]


def test_each_branch_has_the_roles_of_its_own_tokens() -> None:
    turns = [ps.Turn([1], role="user"), ps.Turn([2], logprobs=[-1], role="assistant"), ps.Turn([3], logprobs=[-1])]
    samples = to_samples(ps.Trajectory(turns=turns, parents=[-1, 0, 0]), id="a")
    roles = [read_rollout(sample.rollout).roles for sample in samples]
    assert [list(one or ()) for one in roles] == [[("user", 1), ("assistant", 1)], [("user", 1), ("", 1)]]


def test_a_rollout_of_which_nothing_is_known_adds_no_byte() -> None:
    plain = ps.Trajectory(turns=[ps.Turn([1, 2]), ps.Turn([3], logprobs=[-0.5])], reward=1.0)
    [sample] = to_samples(plain, id="a")
    assert sample.rollout == ""
    assert b"rollout" not in ps.encode([sample])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"info": {"x": "y" * 5000}}, r"info: 5,008 bytes as JSON; at most 4,096"),
        ({"metrics": {f"m{i}": 0.5 for i in range(600)}}, r"metrics: [\d,]+ bytes as JSON; at most 4,096"),
        ({"metrics": {"m": "fast"}}, r"metrics\['m'\]: 'fast'; must be a number"),
        ({"info": {"x": object()}}, r"info: a object; give values that JSON has"),
        ({"info": [1]}, r"info: a list; must be a mapping"),
        ({"seconds": -1}, r"seconds: -1; must be a number of at least 0"),
        ({"seconds": 10**400}, r"seconds: 1000.*; must be a number of at least 0"),
        ({"info": {"x": "\ud800"}}, r"info: .*surrogates not allowed; give values that JSON has"),
        ({"metrics": {"\udc00": 1}}, r"metrics: .*surrogates not allowed"),
        ({"stop_condition": "x" * 600}, r"stop_condition: .*1 to 512 characters"),
    ],
)
def test_what_is_too_large_or_no_json_is_rejected_with_field_size_and_limit(fields: Any, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        rollout(**fields)


def test_roles_of_very_many_turns_are_rejected_with_size_and_limit() -> None:
    turns = [ps.Turn([1], role="user"), ps.Turn([2], logprobs=[-1], role="assistant")] * 4000
    with pytest.raises(InvalidInput, match=r"roles: [\d,]+ bytes as JSON; at most 16,384"):
        to_samples(ps.Trajectory(turns=turns))


def test_numbers_that_are_not_finite_and_those_of_numpy_are_kept() -> None:
    metrics = {"a": math.nan, "b": np.float32(0.5), "c": None, "d": True, "e": 10**400}
    made = rollout(metrics=metrics, info={"n": np.int64(3), "emoji": "\U0001f600"}, truncated=np.bool_(True))
    found = read_rollout(to_samples(made)[0].rollout)
    assert found.metrics == {"a": None, "b": 0.5, "c": None, "d": 1.0, "e": None}
    assert found.info == {"n": 3, "emoji": "\U0001f600"} and found.truncated is True


def test_an_error_that_names_a_file_which_is_not_utf8_is_kept() -> None:
    [sample] = to_samples(rollout(error="no file b\udce9"), id="a")
    assert read_rollout(sample.rollout).error == "no file b?"


def test_seconds_beyond_float32_are_not_known_in_the_summary_of_a_step() -> None:
    groups = [encode_group(to_samples(rollout(seconds=seconds), id="a", group="g")) for seconds in (1e308, 2.0)]
    summary = GroupSummaries.of([metadata_of_pieces(made, group="g", seq_len=16) for made in groups])
    assert summary.numbers("seconds") == [None, 2.0]


@pytest.mark.parametrize(
    "text", ['{"x":1}', "[", '{"info":"\x1b"}', '{"seconds":-1}', '{"roles":{"names":[],"runs":[0,1]}}', "é", "1"]
)
def test_a_text_that_is_no_rollout_is_rejected_in_samples_and_frames(text: str) -> None:
    with pytest.raises(InvalidInput, match="rollout"):
        ps.Sample(token_ids=[1], rollout=text)
    good = ps.Sample(id="a", token_ids=[1, 2])
    object.__setattr__(good, "rollout", text)
    with pytest.raises(CorruptFrame, match="rollout"):
        ps.decode(ps.encode([good]))


def test_metadata_of_a_group_has_truncation_seconds_and_mean_metrics() -> None:
    rollouts = [rollout(**KNOWN), rollout(metrics={"format": 1.0})]
    samples = [s for i, one in enumerate(rollouts) for s in to_samples(one, group="g", id=f"g/{i}")]
    made = encode_group(samples)
    metadata = metadata_of_pieces(made, group="g", seq_len=16)
    assert metadata == check_group(b"".join(made.pieces), group="g", seq_len=16)
    assert list(metadata.truncated) == [1, 0]
    assert metadata.seconds == (3.25, -1.0)
    assert metadata.metrics == {"format": 0.75, "tools": 3.0}


def test_digests_of_samples_without_a_rollout_are_those_of_earlier_versions() -> None:
    from penstock.arrays.digests import sample_digests
    from penstock.arrays.samples import Samples

    plain, known = ps.Sample(id="a", token_ids=[1, 2]), ps.Sample(id="a", token_ids=[1, 2], rollout={"seconds": 1})
    one, two = sample_digests(Samples.of([plain, known]))
    assert one.hex() == "f07d89ab27524d0d99ab1b34104b0e62"
    assert one != two


@pytest.mark.parametrize("log", ["jsonl", "parquet"])
def test_put_to_export_to_convert(tmp_path: Path, log: str) -> None:
    from penstock.view.parquet import ParquetFile

    more: Any = {} if log == "jsonl" else {"file_format": ParquetFile}
    with (
        ps.open("memory:", ranks=1, seq_len=16, groups_per_step=1) as plane,
        TokenExporter(tmp_path / "e", every=1, **more) as out,
    ):
        with plane.group("p", policy_version=0) as group:
            group.add(rollout(**KNOWN))
            group.add(rollout(reward=0.0))
        with plane.source(0, prefetch=0) as source:
            step = source.step(timeout=30)
            for batch in step:
                out.write(step, batch, terms_of(np.random.default_rng(0), batch))
            out.close_step(step)
            source.commit(step)
    [first, second] = sorted(Export(tmp_path / "e").step(1).records(), key=lambda r: r.fields["sample_id"])
    assert {name: first.fields["rollout"][name] for name in KNOWN} == KNOWN
    assert list(Roles(**second.fields["rollout"]["roles"])) == [("user", 2), ("assistant", 2)]
    [path] = (tmp_path / "e").rglob(f"rank_0.{log}")
    convert_files([str(path)], str(tmp_path / "back.jsonl"), source="tokens")
    back = {sample.id: sample for sample in read_lines(Place(str(tmp_path / "back.jsonl")), Lost())}
    assert read_rollout(back[first.fields["sample_id"]].rollout).seconds == 3.25


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "penstock"])
def test_files_keep_it_both_ways(tmp_path: Path, suffix: str) -> None:
    [sample] = to_samples(rollout(**KNOWN), id="a", group="g")
    write_lines([sample], Place(str(tmp_path / "in.jsonl")), Lost())
    convert_files([str(tmp_path / "in.jsonl")], str(tmp_path / "in.penstock"))
    convert_files([str(tmp_path / "in.penstock")], str(tmp_path / f"there.{suffix}"))
    convert_files([str(tmp_path / f"there.{suffix}")], str(tmp_path / "back.jsonl"))
    [back] = read_lines(Place(str(tmp_path / "back.jsonl")), Lost())
    assert back == sample
    if suffix == "jsonl":
        line = json.loads((tmp_path / "there.jsonl").read_text())
        assert line["rollout"]["metrics"] == KNOWN["metrics"]


def test_trl_keeps_metrics_and_a_trajectory_made_of_a_sample_keeps_all_but_roles() -> None:
    [sample] = to_samples(rollout(**KNOWN), id="a", advantage=1.0)
    assert rollout_fields(sample, 0)["metrics"] == {"format": 0.5, "tools": 3.0, "reward": 1.0}
    assert read_rollout(from_trl(rollout_fields(sample, 0)).rollout).metrics == KNOWN["metrics"]
    again = to_trajectory(sample)
    assert {name: getattr(again, name) for name in KNOWN} == KNOWN
