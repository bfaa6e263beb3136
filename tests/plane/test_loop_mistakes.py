"""Mistakes in a training loop are reported: by our errors, or by a line in the log."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.errors import ConfigError, InvalidInput, PeerError, StepAborted
from penstock.packing.accounting import Denominators
from penstock.train.terms import Terms
from penstock.view import TokenExporter
from tests.support.groups import named_group
from tests.support.pace import eventually, pace
from tests.support.planes import OpenPlane

PATIENCE_S = 30 * pace()


def test_eight_steps_without_a_commit_are_warned_of_once(
    open_plane: OpenPlane, caplog: pytest.LogCaptureFixture
) -> None:
    plane = open_plane(ranks=1, groups_per_step=1)
    with plane.source(0, prefetch=0) as source:
        for i in range(12):
            plane.put(named_group(f"g{i}"))
            source.step(timeout=PATIENCE_S)
            warned = [line for line in caplog.messages if "taken and not committed" in line]
            assert len(warned) == (i >= 8), i
    assert "steps 1 to 8 were taken" in warned[0]


def test_who_commits_is_not_warned(open_plane: OpenPlane, caplog: pytest.LogCaptureFixture) -> None:
    plane = open_plane(ranks=1, groups_per_step=1)
    with plane.source(0, prefetch=0) as source:
        for i in range(12):
            plane.put(named_group(f"g{i}"))
            source.commit(source.step(timeout=PATIENCE_S))
    assert "committed" not in caplog.text


class Told(logging.Handler):
    """Acts when a line with these words is logged, as a program of several threads would go on."""

    def __init__(self, words: str, act: Callable[[], object]) -> None:
        super().__init__(logging.WARNING)
        self._words, self._thread = words, threading.Thread(target=act)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if self._words in record.getMessage():
            self.lines.append(record.getMessage())
            if len(self.lines) == 1:
                self._thread.start()

    def close(self) -> None:
        if self.lines:
            self._thread.join()
        super().close()


def test_a_step_that_waits_long_says_once_what_for(open_plane: OpenPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.client.source._LONG_S", 0.0)
    plane = open_plane(ranks=1, groups_per_step=2)
    plane.put(named_group("a"))
    names = iter(["b", "c", "d"])
    told = Told(" waits for ", lambda: plane.put_many(map(named_group, names)))
    logging.getLogger("penstock.source").addHandler(told)
    try:
        with plane.source(0) as source:
            for _ in range(2):
                source.commit(source.step())
    finally:
        logging.getLogger("penstock.source").removeHandler(told)
        told.close()
    assert len(told.lines) == 1
    assert re.match(r"rank 0: (step 1|the first step) waits for \w+.*; step\(timeout=SECONDS\)", told.lines[0])


def test_a_put_that_waits_long_for_room_says_once_why(open_plane: OpenPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.client.producer_connection._LONG_S", 0.0)
    plane = open_plane(ranks=1, groups_per_step=1, capacity=1)

    def train() -> None:
        with plane.source(0) as source:
            for _ in range(2):
                source.commit(source.step(timeout=PATIENCE_S))
            source.flush(PATIENCE_S)

    told = Told("a put waits for room: ", train)
    logging.getLogger("penstock.producer").addHandler(told)
    try:
        for name in ("a", "b", "c"):
            plane.put(named_group(name))
    finally:
        logging.getLogger("penstock.producer").removeHandler(told)
        told.close()
    assert len(told.lines) == 1 and "wait for the trainer" in told.lines[0]


def test_a_second_source_of_one_process_is_not_called_another_process(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1, groups_per_step=1)
    plane.put(named_group("a"))
    first = plane.source(0)
    first.step(timeout=PATIENCE_S)
    second = plane.source(0, resume_step=1)
    words = rf"its process \(pid {os.getpid()} on .+\) already had a source for this rank and opened a second; use one"
    with pytest.raises(StepAborted, match=words):
        first.step(timeout=PATIENCE_S)
    second.close()
    first.close()


def test_a_second_source_before_the_session_runs_tells_the_first(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=2, groups_per_step=1)
    first = plane.source(0)
    eventually(lambda: "rank 1 to join" in plane.status()["waiting_for"])
    second = plane.source(0)
    words = rf"this process \(pid {os.getpid()} on .+\) has opened a second source for rank 0 since; use one"
    with pytest.raises(PeerError, match=words):
        first.step(timeout=PATIENCE_S)
    second.close()
    first.close()


CHANGES = [
    ({"seq_len": 32}, "seq_len: was 64, is now 32"),
    ({"groups_per_step": 3}, "step: was 2 groups, is now 3 groups"),
    ({"run": "other"}, "run: was demo, is now other"),
]


@pytest.mark.parametrize(("change", "words"), CHANGES, ids=[words for _, words in CHANGES])
def test_a_setting_that_changed_since_is_logged_with_both_values(
    open_plane: OpenPlane, tmp_path: Path, caplog: pytest.LogCaptureFixture, change: dict[str, Any], words: str
) -> None:
    given: dict[str, Any] = {"ranks": 1, "run": "demo"}
    with caplog.at_level(logging.WARNING, "penstock"):
        open_plane(tmp_path, **given).close()
        open_plane(tmp_path, **given).close()
        assert "is now" not in caplog.text
        open_plane(tmp_path, **given | change).close()
        assert words in caplog.text
        caplog.clear()
        open_plane(tmp_path, **given | change).close()
        assert "is now" not in caplog.text


@pytest.mark.parametrize("rank", [2, 7, -1, "0"])
def test_a_rank_outside_the_world_is_rejected_at_once(open_plane: OpenPlane, rank: Any) -> None:
    with pytest.raises(InvalidInput, match="must be from 0 to world - 1"):
        open_plane(ranks=2).source(rank)


def sample() -> ps.Sample:
    return named_group("a")[0]


def test_what_is_put_must_be_samples(open_plane: OpenPlane) -> None:
    plane, wrong = open_plane(), ps.Trajectory(turns=[ps.Turn([1]), ps.Turn([2], logprobs=[-0.5])])
    with pytest.raises(InvalidInput, match=r"put: a Sample; .*plane.put\(\[sample"):
        plane.put(sample())  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"put: samples\[0\] is a Trajectory"):
        plane.put([wrong])  # type: ignore[list-item]
    with pytest.raises(InvalidInput, match="put: a str"):
        plane.put("group")  # type: ignore[arg-type]


def test_what_is_put_from_a_task_must_be_samples(open_plane: OpenPlane) -> None:
    with pytest.raises(InvalidInput, match="put: a Sample"):
        asyncio.run(open_plane().aput(sample()))  # type: ignore[arg-type]


def test_what_is_added_must_be_a_trajectory(open_plane: OpenPlane) -> None:
    with pytest.raises(InvalidInput, match=r"add\(Sample\); add a Trajectory"), open_plane().group("p") as group:
        group.add(sample())  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [None, "1", 1.0, {}])
def test_what_is_committed_must_be_a_step(open_plane: OpenPlane, step: Any) -> None:
    with open_plane(ranks=1).source(0) as source:
        with pytest.raises(InvalidInput, match=r"commit: .*pass the step that source.step"):
            source.commit(step)
        with pytest.raises(InvalidInput, match=r"report: .*pass the step that source.step"):
            source.report(step, metrics={"loss": 1.0})


def test_a_version_that_is_text_is_shown_as_text() -> None:
    with pytest.raises(InvalidInput, match="policy_version: '3'; must be a whole number"):
        ps.Sample(group="g", token_ids=[1, 2], loss_mask=[0, 1], policy_version="3")  # type: ignore[arg-type]


def test_a_mean_needs_denominators() -> None:
    torch = pytest.importorskip("torch")
    terms = Terms(loss=torch.zeros(2), trainer_logprobs=torch.zeros(2))
    with pytest.raises(InvalidInput, match=r"mean of int 8; pass step.denominators"):
        terms.mean(8)  # type: ignore[arg-type]
    assert terms.mean(Denominators(loss_tokens=2)).item() == 0.0


def test_an_exporter_needs_a_micro_batch_and_terms(tmp_path: Path) -> None:
    with (
        TokenExporter(tmp_path) as exporter,
        pytest.raises(InvalidInput, match=r"write\(dict, dict\); pass a micro-batch"),
    ):
        exporter.write(10, {}, {})  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [None, "1", {}])
def test_an_exporter_needs_a_step(tmp_path: Path, step: Any) -> None:
    batch = ps.pack(named_group("a"), ranks=1, seq_len=64).ranks[0][0]
    with TokenExporter(tmp_path) as exporter:
        with pytest.raises(InvalidInput, match=r"write: .*; pass the step, or its number"):
            exporter.write(step, batch, None)
        with pytest.raises(InvalidInput, match=r"close_step: .*; pass the step, or its number"):
            exporter.close_step(step)
        with pytest.raises(InvalidInput, match="metrics: a list; give a mapping"):
            exporter.close_step(1, metrics=[step])  # type: ignore[arg-type]


@pytest.mark.parametrize(("group", "frame"), [("g", None), ("g", "text"), (None, b""), (7, b"")])
def test_a_frame_must_be_bytes(open_plane: OpenPlane, group: Any, frame: Any) -> None:
    with pytest.raises(InvalidInput, match=r"put_frame\(.*; give a group's id as text, and its frame as bytes"):
        open_plane().put_frame(group, frame)


def test_what_is_reported_must_be_numbers_by_id(open_plane: OpenPlane) -> None:
    with open_plane(ranks=1).source(0) as source:
        for wrong in ([1.0], "x", 3, []):
            with pytest.raises(InvalidInput, match=r"report: priorities: a .*; give a mapping"):
                source.report(1, priorities=wrong)  # type: ignore[arg-type]
            with pytest.raises(InvalidInput, match=r"report: metrics: a .*; give a mapping"):
                source.report(1, metrics=wrong)  # type: ignore[arg-type]


def test_the_reason_of_a_failure_may_be_an_exception(open_plane: OpenPlane) -> None:
    with open_plane(ranks=1).source(0) as source:
        source.fail(ValueError("out of memory"))
        with pytest.raises(StepAborted, match=r"rank 0: ValueError\('out of memory'\)"):
            source.step(timeout=PATIENCE_S)


@pytest.mark.parametrize(("where", "meant"), [("memory", "memory:"), ("localhost:7440", "tcp://localhost:7440")])
def test_an_address_without_its_scheme_makes_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, meant: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"give '{meant}', or './{where}' for a folder"):
        ps.open(where, ranks=1, seq_len=16, groups_per_step=1)
    assert list(tmp_path.iterdir()) == []
    ps.open(f"./{where}", ranks=1, seq_len=16, groups_per_step=1).close()


def test_a_missing_step_target_is_named_by_its_settings() -> None:
    with pytest.raises(ConfigError, match="memory: when a step is full: missing; give one of groups_per_step, samp"):
        ps.open("memory:", ranks=1, seq_len=16)


class Held(logging.Handler):
    """Holds the plane's thread in a log call, until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.holds, self.go = threading.Event(), threading.Event()

    def createLock(self) -> None:
        self.lock = None  # other threads log meanwhile

    def emit(self, record: logging.LogRecord) -> None:
        if threading.current_thread().name == "penstock-plane":
            self.holds.set()
            self.go.wait(PATIENCE_S)


def test_close_says_what_a_plane_is_doing_that_does_not_end(
    open_plane: OpenPlane, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.client.plane._CLOSING_S", 0.1)
    plane = open_plane(ranks=1, groups_per_step=1)
    held, of_planes = Held(), logging.getLogger("penstock")
    with caplog.at_level(logging.INFO, "penstock"):
        of_planes.addHandler(held)
        try:
            source = plane.source(0)  # the plane logs that it joined
            assert held.holds.wait(PATIENCE_S)
            plane.close()
        finally:
            held.go.set()
            of_planes.removeHandler(held)
    source.close()
    (said,) = [r.getMessage() for r in caplog.records if "still runs 0.1 s after close" in r.getMessage()]
    assert "self.go.wait" in said


@pytest.mark.parametrize("where", ["memory:", "folder"])
def test_keys_without_listen_are_rejected(where: str, tmp_path: Path) -> None:
    place = where if where == "memory:" else str(tmp_path / where)
    with pytest.raises(ConfigError, match=r"keys: .* without listen"):
        ps.open(place, ranks=1, seq_len=8, groups_per_step=1, keys=str(tmp_path))
    with pytest.raises(ConfigError, match="keys: ''; give the folder"):
        ps.open("tcp://127.0.0.1:1", keys="")
