"""A sample longer than `seq_len` is never cut without a word: it is rejected, or what happens to it is counted."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.commands.top import looking, page
from penstock.errors import InvalidInput
from penstock.frames import encode
from penstock.packing import Packing
from penstock.plane.settings import PlaneSettings, Target
from penstock.runs import RecordedRun, rerun
from penstock.server.http_api import _accepted, _of_frame
from penstock.server.prometheus import render
from penstock.view import Export
from penstock.view.library import Library
from tests.support.planes import OpenPlane

TRUNCATED = {"truncated_samples": 1, "truncated_tokens": 84, "dropped_samples": 0, "dropped_tokens": 0}
DROPPED_LATER = {"truncated_samples": 0, "truncated_tokens": 0, "dropped_samples": 2, "dropped_tokens": 140}
DROPPED = {"truncated_samples": 0, "truncated_tokens": 0, "dropped_samples": 1, "dropped_tokens": 100}


def group(name: str, *lengths: int) -> list[ps.Sample]:
    """Samples of these lengths, whose last half is trained."""
    return [
        ps.Sample(
            id=f"{name}/{i}",
            group=name,
            token_ids=[1] * n,
            loss_mask=[False] + [True] * (n - 1),
            logprobs=[-0.5] * n,
            advantages=1.0,
        )
        for i, n in enumerate(lengths)
    ]


def tokens_of_step(plane: ps.Plane) -> int:
    with plane.source(0) as source:
        step = source.step(timeout=60)
        source.commit(step)
        return step.accounting.total.tokens


def test_a_sample_longer_than_seq_len_is_rejected_with_both_lengths(open_plane: OpenPlane) -> None:
    assert PlaneSettings(packing=Packing(ranks=1, seq_len=16), target=Target(groups=1)).over_length == "reject"
    plane = open_plane(ranks=1, seq_len=16, over_length="reject")
    with pytest.raises(InvalidInput, match=r"group 'g': sample 'g/1' has 100 tokens and seq_len is 16 .1 of 2 samples"):
        plane.put(group("g", 10, 100))
    assert plane.ledger.accepted == 0
    assert plane.put(group("g", 10, 16))


def test_an_evaluation_group_may_be_longer(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1, seq_len=16)
    assert plane.put(group("g", 100), evaluation=True)
    assert not any(plane.ledger.as_dict()["over_length"].values())


@pytest.mark.parametrize(("over_length", "counted", "tokens"), [("truncate", TRUNCATED, 26), ("drop", DROPPED, 10)])
def test_what_is_truncated_or_dropped_is_counted_wherever_samples_are(
    open_plane: OpenPlane,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    over_length: str,
    counted: dict[str, int],
    tokens: int,
) -> None:
    caplog.set_level(logging.WARNING, "penstock")
    settings = {"ranks": 1, "seq_len": 16, "groups_per_step": 1, "over_length": over_length}
    plane = open_plane(tmp_path / "run", **settings)
    samples, encoded = _of_frame(encode(group("g", 10, 100)), False)
    answer, status = _accepted(samples, encoded, plane.deliver(encoded, timeout=0))
    assert status == 201 and answer["over_length"] == counted
    assert _accepted(samples, encoded, plane.deliver(encoded, timeout=0))[1] == 200
    assert plane.status()["ledger"]["over_length"] == counted == dict(plane.counts.over_length)
    (warned,) = [record.getMessage() for record in caplog.records if record.name == "penstock.producer"]
    words = {"truncate": "1 sample truncated by 84 tokens", "drop": "1 sample of 100 tokens dropped"}
    assert f"; so far: {words[over_length]}; generate fewer tokens" in warned
    action = over_length.removesuffix("e").removesuffix("p")
    metrics = [line for line in render(plane.status() | {"uptime_s": 1.0}).splitlines() if "over_length" in line]
    assert any(f'tokens_total{{action="{action}' in line and line.endswith(("84.0", "100.0")) for line in metrics)
    assert "put: a group has samples longer than seq_len: 1 sample" in caplog.text
    with looking(str(tmp_path / "run")) as look:
        assert any(line.startswith("too long ") and "tokens" in line for line in page(look(), {}))
    viewed = Library(exports={"run": Export(tmp_path / "run", awaited=True)}).dropped("run", "")
    assert viewed["ledger"]["over_length"] == counted
    assert tokens_of_step(plane) == tokens
    plane.close()
    assert open_plane(tmp_path / "run", **settings).ledger.as_dict()["over_length"] == counted


def test_a_group_of_which_nothing_is_left_is_counted_once_and_not_trained(
    open_plane: OpenPlane, tmp_path: Path
) -> None:
    settings = {"ranks": 1, "seq_len": 16, "groups_per_step": 1, "over_length": "drop"}
    plane = open_plane(tmp_path / "run", **settings)
    assert plane.put(group("g", 100))
    assert not plane.put(group("g", 100))
    plane.close()
    plane = open_plane(tmp_path / "run", **settings)
    assert not plane.put(group("g", 100))
    assert plane.ledger.as_dict()["over_length"] == DROPPED and plane.ledger.accepted == 0
    plane.put(group("h", 12))
    assert tokens_of_step(plane) == 12


@pytest.mark.parametrize("over_length", ["reject", "truncate"])
def test_a_plane_opened_again_with_a_smaller_seq_len_counts_and_logs_what_it_truncates(
    open_plane: OpenPlane, tmp_path: Path, caplog: pytest.LogCaptureFixture, over_length: str
) -> None:
    settings = {"ranks": 1, "groups_per_step": 1, "over_length": over_length}
    plane = open_plane(tmp_path / "run", seq_len=128, **settings)
    plane.put(group("g", 10, 100))
    plane.close()
    caplog.set_level(logging.WARNING, "penstock")
    for _ in range(2):
        plane = open_plane(tmp_path / "run", seq_len=16, **settings)
        assert plane.ledger.as_dict()["over_length"] == TRUNCATED
        plane.close()
    said = [record.getMessage() for record in caplog.records if "seq_len: now 16" in record.getMessage()]
    assert said == ["seq_len: now 16, before 128: of the waiting groups, 1 sample truncated by 84 tokens"]
    assert tokens_of_step(open_plane(tmp_path / "run", seq_len=16, **settings)) == 26


@pytest.mark.parametrize(
    ("over_length", "counted"),
    [("truncate", {**TRUNCATED, "truncated_samples": 2, "truncated_tokens": 84 + 24}), ("drop", DROPPED_LATER)],
)
def test_what_one_seq_len_cut_is_not_counted_again_by_the_next(
    open_plane: OpenPlane,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    over_length: str,
    counted: dict[str, int],
) -> None:
    settings = {"ranks": 1, "groups_per_step": 1, "over_length": over_length}
    plane = open_plane(tmp_path / "run", seq_len=128, **settings)
    plane.put(group("g", 10, 100))
    plane.close()
    caplog.set_level(logging.WARNING, "penstock")
    for seq_len in (64, 16, 128, 16, 64, 128):
        open_plane(tmp_path / "run", seq_len=seq_len, **settings).close()
    said = [
        text.rpartition("of the waiting groups, ")[2] for text in caplog.messages if "of the waiting groups" in text
    ]
    truncated = ["1 sample truncated by 36 tokens", "1 sample truncated by 84 tokens"]
    assert said == (truncated if over_length == "truncate" else ["1 sample of 100 tokens dropped"])
    plane = open_plane(tmp_path / "run", seq_len=128, **settings)
    plane.put(group("later", 10, 40))
    plane.close()
    for seq_len in (16, 64, 32, 16):
        plane = open_plane(tmp_path / "run", seq_len=seq_len, **settings)
        assert plane.ledger.as_dict()["over_length"] == counted
        plane.close()


def test_pack_without_a_plane_truncates_and_counts() -> None:
    step = ps.pack(group("g", 10, 100), ranks=1, seq_len=16)
    assert (step.accounting.truncated_samples, step.accounting.truncated_tokens) == (1, 84)


@pytest.mark.parametrize("late", [False, True], ids=["held", "waiting"])
def test_a_group_that_a_smaller_seq_len_leaves_empty_is_dropped_with_the_reason_of_a_put(
    open_plane: OpenPlane, tmp_path: Path, caplog: pytest.LogCaptureFixture, late: bool
) -> None:
    settings: dict[str, Any] = {"ranks": 1, "groups_per_step": 1, "over_length": "drop", "retain": "all"}
    if late:
        settings |= {"needs": ("rewards",), "needs_deadline_s": 600.0}
    plane = open_plane(tmp_path / "run", seq_len=128, **settings)
    plane.put(group("empty", 100, 90))
    plane.put(group("part", 10, 100))
    plane.close()
    caplog.set_level(logging.WARNING, "penstock")
    for _ in range(2):
        plane = open_plane(tmp_path / "run", seq_len=16, **settings)
        ledger = plane.ledger
        assert dict(ledger.dropped) == {"over_length": 2}
        assert (ledger.held, ledger.waiting, ledger.quarantined) == ((0, 2, 0) if late else (2, 0, 0))
        assert ledger.as_dict()["over_length"]["dropped_samples"] == 3
        state = plane.has(["empty"])["empty"]
        assert (state.state, state.reason) == ("dropped", "over_length")
        dropped = [event for event in plane.feedback() if event.outcome == "dropped"]
        assert [(event.group, event.reason, event.samples) for event in dropped] == [("empty", "over_length", 2)]
        plane.close()
    (said,) = [text for text in caplog.messages if "seq_len: now 16" in text]
    assert said.endswith("3 samples of 290 tokens dropped; 1 group is left empty and dropped")
    plane = open_plane(tmp_path / "run", seq_len=16, **settings)
    if late:
        plane.attach("rewards", {"part": {"part/0": 1.0, "part/1": 0.0}})
        assert plane.attach("rewards", {"empty": {"empty/0": 1.0}}).late == 1
    assert tokens_of_step(plane) == 10
    plane.close()
    found = rerun(RecordedRun.open(tmp_path / "run"), tmp_path / "again")
    assert found.same and found.steps == 1, found
