"""Alerts and the dashboard in deploy/ ask for numbers that a plane's page has."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

import penstock as ps
from penstock.commands import top
from penstock.plane.telemetry import BOUNDS, COUNTS, Durations, Marks
from penstock.server import PlaneProcess
from penstock.storage import MemoryStorage, Pieces, Writer, new_segment_name
from penstock.storage.in_memory import MemorySegment
from tests.support.groups import named_group
from tests.support.plane_processes import SMALL

ROOT = Path(__file__).parent.parent
ALERTS = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text())["groups"][0]["rules"]
DASHBOARD = json.loads((ROOT / "deploy/grafana/penstock.json").read_text())
PROMTOOL = shutil.which("promtool", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
_METRIC = re.compile(r"penstock_\w+")
_KIND = re.compile(r'kind=~?"([^"]*)"')
_WHEN_SOME = {"penstock_ledger_dropped_samples_total", "penstock_ledger_discarded_samples_total"}
"""There once something was dropped or discarded: they have a label for each reason."""


def expressions() -> list[str]:
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return [rule["expr"] for rule in ALERTS] + panels


@pytest.mark.process
def test_every_number_that_is_asked_for_is_on_the_page(tmp_path: Path) -> None:
    words = [str(tmp_path / "run"), *SMALL, "--listen=tcp://127.0.0.1:*", "--metrics=127.0.0.1:0"]
    with PlaneProcess([*words, "--max-disk-bytes=1000000000"]) as plane:
        with urllib.request.urlopen(plane.ready["metrics"], timeout=30) as answer:
            page = answer.read().decode()
        with ps.open(plane.ready["urls"][0]) as client:
            assert set(COUNTS) == set(client.status()["counts"])
    there = set(re.findall(r"(?m)^(penstock_\w+)\{", page))
    asked = {name for text in expressions() for name in _METRIC.findall(text)}
    assert asked - _WHEN_SOME <= there
    assert not re.search(r"(?m)^penstock_\w+ ", page), "every number names its run"


def test_every_alert_has_a_test_that_fires_and_one_that_does_not() -> None:
    cases = yaml.safe_load((ROOT / "deploy/prometheus/alerts_test.yaml").read_text())["tests"]
    tried = [(one["alertname"], bool(one["exp_alerts"])) for case in cases for one in case["alert_rule_test"]]
    assert set(tried) == {(rule["alert"], fires) for rule in ALERTS for fires in (True, False)}


@pytest.mark.process
@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool: scripts/setup_promtool gets it")
@pytest.mark.parametrize("words", [("check", "rules", "alerts.yaml"), ("test", "rules", "alerts_test.yaml")])
def test_prometheus_itself_takes_the_alerts_and_their_tests(words: tuple[str, ...]) -> None:
    done = subprocess.run(
        [str(PROMTOOL), *words],
        cwd=ROOT / "deploy/prometheus",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_event_that_is_asked_for_is_counted() -> None:
    for text in expressions():
        for pattern in _KIND.findall(text):
            for one in pattern.split("|"):
                assert any(re.fullmatch(one, name) for name in COUNTS), (one, text)


def test_nothing_else_is_counted() -> None:
    used: set[str] = set()
    packages = ("plane", "client", "server", "runs")
    for path in (path for name in packages for path in (ROOT / "src/penstock" / name).glob("*.py")):
        text = path.read_text()
        for found in re.findall(r"counts\[([^\]]*\"[^\]]*)\]|run_logger\.count\((\"\w+\")", text):
            used |= set(re.findall(r'"(\w+)"', "".join(found)))
    assert "puts_refused" in used and used <= set(COUNTS)


def test_the_page_about_operating_says_what_to_do_about_every_alert() -> None:
    page = (ROOT / "docs/operate.md").read_text()
    assert [rule["alert"] for rule in ALERTS if f"`{rule['alert']}`" not in page] == []


def test_durations_are_counted_by_bucket_and_long_ones_logged(caplog: pytest.LogCaptureFixture) -> None:
    durations = Durations()
    with caplog.at_level(logging.WARNING, "penstock.plane"):
        durations.add("turn", 0.0005)
        durations.add("turn", 0.3, lambda: "planning 299 ms")
        for _ in range(200):
            durations.add("commit", 11.0)
        durations.add("write", 0.2, "2 frames")
    found = durations.as_dict()
    assert sum(found["turn"]["counts"]) == 2 and found["turn"]["counts"][0] == 1
    assert found["turn"]["counts"][BOUNDS.index(0.5)] == 1
    assert found["commit"]["counts"][-1] == 200 and sum(found["write"]["counts"]) == 1
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "slow turn: 300 ms, planning 299 ms (1 so far)"
    assert len([line for line in lines if "commit" in line]) == 11  # ten, and the hundredth
    slow = durations.slow()  # lists what the log leaves out, and never grows
    assert slow["counts"] == {"turn": 1, "commit": 200, "write": 1} and len(slow["last"]) == 32
    assert (slow["last"][-1]["work"], slow["last"][-1]["doing"]) == ("write", "2 frames")


def test_the_longest_part_of_a_turn_is_named() -> None:
    marks = Marks()
    assert marks.longest() == ""
    marks.begin()
    marks.mark("messages")
    sum(range(200_000))
    marks.mark("planning")
    assert marks.longest().startswith("planning ")


def test_top_shows_the_last_slow_piece_of_work() -> None:
    durations = Durations()
    durations.add("turn", 0.2, "planning 199 ms, CPU 1 ms")
    durations.add("commit", 0.4123, "lock 0 ms, sync 412 ms, witness 0 ms, 858 bytes of blobs")
    with ps.open("memory:", ranks=1, seq_len=64, groups_per_step=1) as plane:
        status = plane.status()
        assert status["slow"].keys() == durations.slow().keys()
    (line,) = [one for one in top.page(top._from_plane(status | {"slow": durations.slow()}), {}) if one[:4] == "slow"]
    assert line.startswith("slow       1 turns, 1 commits above 100 ms; the last at ")
    assert line.endswith(": commit 412 ms (lock 0 ms, sync 412 ms, witness 0 ms, 858 bytes of blobs)")


def test_a_slow_commit_and_a_slow_write_are_recorded_with_what_they_did(tmp_path: Path) -> None:
    """Every commit and write is slow here: the threshold is zero."""
    with ps.open(tmp_path / "run", ranks=1, seq_len=64, groups_per_step=1, direct=False) as plane:
        assert plane._server is not None
        plane._server.engine.durations._slow_s = 0.0
        plane.put(named_group("a"))
        found = {one["work"]: one["doing"] for one in plane.status()["slow"]["last"]}
    assert re.fullmatch(r"lock \d+ ms, sync \d+ ms, witness \d+ ms, [\d,]+ bytes of blobs", found["commit"])
    assert re.fullmatch(r"1 frames, [\d,]+ bytes", found["write"])
    assert re.fullmatch(r"[a-z ]+ \d+ ms, CPU \d+ ms", found["turn"])


def test_a_worker_logs_its_own_slow_writes(caplog: pytest.LogCaptureFixture) -> None:
    class SlowSegment(MemorySegment):
        def append(self, frames: Sequence[Pieces], deadline: float = math.inf) -> list[str]:
            threading.Event().wait(0.11)
            return super().append(frames, deadline)

    class SlowStorage(MemoryStorage):
        def create(self, segment: str) -> MemorySegment:
            return SlowSegment(segment, {})

    with caplog.at_level(logging.WARNING, "penstock.storage"):
        Writer(SlowStorage(), new_segment_name).write([[b"frame"]])
        Writer(MemoryStorage(), new_segment_name).write([[b"frame"]])
    (record,) = caplog.records
    assert re.fullmatch(r"slow write: \d+ ms, 1 frames, 5 bytes \(1 so far\)", record.getMessage())
