from __future__ import annotations

import http.client
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families

import penstock as ps
from penstock.cli import main
from penstock.errors import ConfigError, WaitTimeout
from penstock.plane.settings import server_settings
from penstock.server.daemon import LIVE_S, LoopHooks
from penstock.server.metrics_page import MetricsPage, metrics_token
from penstock.server.plane_process import PlaneProcess
from penstock.server.prometheus import Snapshot, render
from tests.support.plane_processes import SMALL

pytestmark = pytest.mark.process


def status() -> dict[str, Any]:
    with ps.open("memory:", ranks=1, seq_len=64, groups_per_step=1, run='odd "name"') as plane:
        for name in ("a", "b"):
            with plane.group(name) as group:
                for reward in (0.0, 1.0):
                    group.add(ps.Trajectory(turns=[ps.Turn([1, 2]), ps.Turn([3], logprobs=[-0.5])], reward=reward))
        plane.discard("too long", 5)
        with plane.source(rank=0, prefetch=0) as source:
            source.commit(source.step(timeout=120), policy_version=1)
            source.flush()
            return plane.status()


def parse(text: str) -> dict[str, float]:
    """The values by name and labels but `run`, which every line must have."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        assert family.type in ("counter", "gauge", "histogram") and family.documentation
        for sample in family.samples:
            assert sample.name.endswith("_total") == (family.type == "counter"), sample
            labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items() if name != "run")
            assert "run" in sample.labels
            key = f"{sample.name}{{{labels}}}" if labels else sample.name
            assert key not in values
            values[key] = sample.value
    return values


def test_every_line_is_prometheus_text_and_the_numbers_are_the_planes() -> None:
    found = status()
    values = parse(render(found))
    assert values["penstock_gen_items_total"] == 2
    assert values["penstock_buffer_items"] == 1
    assert values["penstock_train_items_total"] == 1
    assert values['penstock_ledger_samples{state="committed"}'] == 2
    assert values['penstock_ledger_discarded_samples_total{reason="too long"}'] == 5
    assert values['penstock_buffer_evicted_total{reason="sampled_out"}'] == 1
    assert values['penstock_plane_phase{phase="running"}'] == 1
    assert values["penstock_ledger_balanced"] == 1
    assert values["penstock_plane_policy_version"] == 1
    assert values["penstock_plane_held_bytes"] == found["held_bytes"] > 0


def test_the_run_is_a_label_on_every_line_with_its_odd_characters_escaped() -> None:
    lines = [line for line in render(status()).splitlines() if not line.startswith("#")]
    assert all(r'run="odd \"name\""' in line for line in lines)


@pytest.fixture(scope="module")
def plane() -> Iterator[PlaneProcess]:
    with PlaneProcess(["memory:", *SMALL, "--listen=tcp://127.0.0.1:*", "--metrics=127.0.0.1:0"]) as process:
        yield process


def get(url: str, path: str = "/metrics", method: str = "GET", **headers: str) -> tuple[int, str]:
    place = urlsplit(url)
    assert place.hostname is not None
    line = http.client.HTTPConnection(place.hostname, place.port, timeout=120)
    try:
        line.request(method, path, headers=headers)
        answer = line.getresponse()
        return answer.status, answer.read().decode()
    finally:
        line.close()


def test_a_running_plane_shows_its_page(plane: PlaneProcess) -> None:
    code, text = get(plane.ready["metrics"])
    assert code == 200
    assert parse(text)["penstock_plane_missing_processes"] == 1


def test_only_this_page_this_method_and_this_host_are_answered(plane: PlaneProcess) -> None:
    url = plane.ready["metrics"]
    assert get(url, "/")[0] == 404
    assert get(url, "/metrics/../etc/passwd")[0] == 404
    assert get(url, Host="evil.example:80")[0] == 403
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE"):
        assert get(url, method=method)[0] == 405


def test_many_readers_at_once_all_get_an_answer(plane: PlaneProcess) -> None:
    codes: list[int] = []
    readers = [threading.Thread(target=lambda: codes.append(get(plane.ready["metrics"])[0])) for _ in range(8)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert codes == [200] * 8


def test_a_plane_that_does_not_turn_is_shown_as_unavailable() -> None:
    snapshot = Snapshot(dict)
    page = MetricsPage("127.0.0.1:0", lambda: snapshot.ask(0.05))
    try:
        code, text = get(page.url)
        assert code == 503
        assert "did not answer within 0.05 s" in text
    finally:
        page.close()


def test_a_late_answer_is_not_taken_for_a_later_question() -> None:
    taken: list[int] = []

    def take() -> dict[str, Any]:
        taken.append(1)
        return {"n": len(taken)}

    snapshot = Snapshot(take)
    with pytest.raises(WaitTimeout):
        snapshot.ask(0.0)
    snapshot.on_turn()  # answers nobody
    snapshot.on_turn()  # nobody asked since: costs nothing
    assert len(taken) == 1
    with pytest.raises(WaitTimeout):
        snapshot.ask(0.0)


@pytest.mark.parametrize(
    "address", ["0.0.0.0:1", "10.0.0.1:1", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:70000", "[::]:1", ":1"]
)
def test_addresses_beyond_this_host_are_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="metrics"):
        MetricsPage(address, dict)


# ------------------------------------------------------------------ probes and tokens


class Told:
    """Says what it was told to."""

    live = ready = ""

    def not_live(self) -> str:
        return self.live

    def not_ready(self) -> str:
        return self.ready


def test_probes_are_answered_under_any_name_and_without_a_token() -> None:
    health, token = Told(), "t" * 32
    page = MetricsPage("127.0.0.1:0", dict, lambda _: "numbers\n", token=token, health=health)
    try:
        for path in ("/healthz", "/readyz"):
            assert get(page.url, path, Host="10.1.2.3:9464") == (200, "ok\n")
        health.live, health.ready = "the plane's loop has not turned for 31 s", "ending"
        assert get(page.url, "/healthz") == (503, "the plane's loop has not turned for 31 s\n")
        assert get(page.url, "/readyz") == (503, "ending\n")
        assert get(page.url)[0] == get(page.url, Authorization="Bearer " + "x" * 32)[0] == 401
        assert get(page.url, Authorization=f"Bearer {token}", Host="plane.example") == (200, "numbers\n")
    finally:
        page.close()


def test_a_page_that_other_hosts_can_reach_needs_a_token(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="metrics_token"):
        metrics_token("0.0.0.0:0", None)
    file = tmp_path / "token"
    file.write_text("short\n")
    file.chmod(0o600)
    with pytest.raises(ConfigError, match=r"metrics_token: .*5 characters"):
        metrics_token("0.0.0.0:0", str(file))
    file.write_text("y" * 40)
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="others may read it"):
        metrics_token("0.0.0.0:0", str(file))
    file.chmod(0o600)
    words = ["memory:", *SMALL, "--listen=tcp://127.0.0.1:*", "--metrics=0.0.0.0:0", f"--metrics-token={file}"]
    with PlaneProcess(words) as process:
        url = process.ready["metrics"].replace("0.0.0.0", "127.0.0.1")
        assert get(url)[0] == 401
        code, text = get(url, Authorization="Bearer " + "y" * 40)
        assert code == 200 and "penstock_plane_uptime_s" in text
        assert get(url, "/healthz") == get(url, "/readyz") == (200, "ok\n")


def test_a_plane_is_live_while_its_loop_turns_and_ready_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("penstock.server.daemon.time.monotonic", lambda: now[0])
    hooks = LoopHooks(
        server_settings({"folder": "memory:", "packing": {"ranks": 1, "seq_len": 8}, "target": {"groups": 1}})
    )
    assert hooks.not_ready() == "starting" and not hooks.not_live()
    hooks()
    assert not hooks.not_ready() and not hooks.not_live()
    now[0] += LIVE_S + 1
    assert hooks.not_live() == hooks.not_ready() == "the plane's loop has not turned for 31 s"
    now[0] -= LIVE_S
    hooks.on_signal(signal.SIGTERM, None)
    assert hooks.not_ready() == "ending" and not hooks.not_live()


def test_a_token_without_a_page_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["serve", "memory:", *SMALL, "--listen=tcp://127.0.0.1:*", f"--metrics-token={tmp_path / 'token'}"]
    assert main(words) == 1
    assert "without metrics" in capfd.readouterr().err
