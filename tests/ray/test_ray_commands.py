"""Commands by the address of a plane, the pages of a server process, and waits that end with a reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.ray import calls
from penstock.ray.calls import actor_of
from tests.support.groups import named_group
from tests.support.ray_run import RayRun

NewRun = Callable[..., RayRun]


def call(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock.cli", *words]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300, env=os.environ | environment
    )


def test_top_inspect_tokens_and_view_take_the_address(new_run: NewRun, tmp_path: Path) -> None:
    run = new_run()
    run.put(range(4))
    assert run.plane.put(named_group("evaluated", samples=2, tokens=10), evaluation=True)
    run.join()
    run.take()
    run.flush()
    top = call("top", run.address, "--json")
    assert top.returncode == 0, top.stderr
    assert json.loads(top.stdout)["next_step"] == 2
    inspect = call("inspect", run.address, "--json")
    assert inspect.returncode == 0, inspect.stderr
    assert {group["id"] for group in json.loads(inspect.stdout)["groups"]} >= {"g0", "g1", "g2", "g3"}
    tokens = call("tokens", run.address, "--evaluation", "--json")
    assert tokens.returncode == 0, tokens.stderr
    assert json.loads(tokens.stdout)["steps"][0]["records"] == 2
    view = call("view", run.address, "--html", str(tmp_path / "page.html"))
    assert view.returncode == 0, view.stderr
    assert (tmp_path / "page.html").stat().st_size > 0


def test_a_plane_of_a_cluster_has_the_pages_of_a_server_process(new_run: NewRun) -> None:
    run = new_run(metrics="127.0.0.1:0", http="127.0.0.1:0", max_disk_bytes=1 << 30)
    place = calls.ask(actor_of(run.name), "place")
    with urllib.request.urlopen(place["metrics"], timeout=60) as page:
        assert b"penstock_" in page.read()
    with urllib.request.urlopen(place["metrics"].replace("/metrics", "/readyz"), timeout=60) as page:
        assert page.read() == b"ok\n"
    assert place["http"].startswith("http://127.0.0.1:")


def test_serve_starts_finds_and_ends_a_plane(new_run: NewRun, tmp_path: Path) -> None:
    words = ["serve", str(tmp_path / "served"), "--ray", "served", "--ranks", "1", "--seq-len", "16"]
    started = call(*words, "--groups-per-step", "1", "--json")
    assert started.returncode == 0, started.stderr
    assert started.stderr.startswith("ray://served: looking for it")
    assert json.loads(started.stdout)["urls"] == ["ray://served"]
    assert call("serve", "--ray", "served", "--end").stdout == "ray://served: ended\n"
    assert (tmp_path / "served" / "log.sqlite").is_file()


@pytest.mark.usefixtures("cluster")
def test_an_address_without_a_cluster_is_named_at_once() -> None:
    done = call("top", "ray://demo", "--once", RAY_ADDRESS="127.0.0.1:9")
    assert done.returncode == 1
    assert "RAY_ADDRESS=127.0.0.1:9: no Ray cluster answers there" in done.stderr
