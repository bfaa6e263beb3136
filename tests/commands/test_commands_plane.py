"""The commands an operator uses on a plane: serve, top, inspect of a run, keys, doctor."""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.cli import main
from penstock.commands import doctor, inspect, serve, top
from penstock.config import Given
from penstock.errors import CorruptFile, InvalidInput
from penstock.plane.settings import server_settings
from penstock.runs.run_log import read_run
from penstock.server.plane_process import PlaneProcess
from tests.support.plane_processes import SMALL

pytestmark = pytest.mark.process


def put(plane: ps.Plane, name: str) -> None:
    with plane.group(name, id=name) as group:
        for reward in (0.0, 1.0):
            group.add(ps.Trajectory(turns=[ps.Turn([1, 2]), ps.Turn([3], logprobs=[-0.5])], reward=reward))


def train(plane: ps.Plane, steps: int) -> None:
    with plane.source(rank=0, prefetch=0) as source:
        for _ in range(steps):
            step = source.step(timeout=120)
            source.commit(step, policy_version=step.number)
        source.flush()


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlaneProcess]:
    """A plane at work on a folder: five groups put, two steps trained, three samples discarded."""
    folder = tmp_path_factory.mktemp("runs") / "demo"
    with PlaneProcess([str(folder), *SMALL, "--listen=tcp://127.0.0.1:*"]) as process:
        with ps.open(process.url) as line:
            for name in ("a", "b", "c", "d", "bad\u202ename"):
                put(line, name)
            line.discard("too long", 3)
            train(line, 2)
        yield process


def out(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(words) == code
    return capsys.readouterr().out


# ------------------------------------------------------------------ serve


def test_a_written_config_starts_a_plane(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plane.toml"
    assert "penstock serve --config" in out(capsys, "serve", "--write-config", str(path))
    assert main(["serve", "--write-config", str(path)]) == 1
    assert "exists" in capsys.readouterr().err
    with PlaneProcess([f"--config={path}", "--listen=tcp://127.0.0.1:*"]) as process:
        assert process.ready["folder"] == str(tmp_path / "runs/demo")
        assert (tmp_path / "runs/demo/log.sqlite").exists()


def given(*words: str) -> Given:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return serve.given_by(parser.parse_args(words))


def test_words_on_the_command_line_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "plane.toml"
    path.write_text('folder = "x"\nrun = "file"\n[packing]\nranks = 1\nseq_len = 8\n[target]\ngroups = 4\n')
    words = (f"--config={path}", "--ranks=3", "--tokens-per-step=99", "--run=flag", "--set=timeouts.peer_s=9")
    config = server_settings(given(*words))
    assert (config.packing.ranks, config.packing.seq_len, config.target.tokens) == (3, 8, 99)
    assert (config.target.groups, config.run, config.timeouts.peer_s) == (None, "flag", 9)


def test_what_is_missing_is_named_by_its_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve"]) == 2
    text = capsys.readouterr().err
    assert all(word in text for word in ("FOLDER", "--ranks and --seq-len", "--groups-per-step", "--config"))


def test_the_lines_it_prints_connect_a_rank_and_a_worker() -> None:
    command = [sys.executable, "-m", "penstock.cli", "serve", "memory:", *SMALL, "--listen=tcp://127.0.0.1:*"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        lines = [process.stdout.readline() for _ in range(4)]
        rank, worker = (line.split(maxsplit=2)[2] for line in lines[2:])
        names: dict[str, Any] = {"ps": ps, "RANK": 0}
        exec(f"{rank}\n{worker}", names)  # as a user would paste them
        put(names["plane"], "a")
        assert names["source"].step(timeout=120).number == 1
        names["source"].close()
        names["plane"].close()
    finally:
        process.terminate()
        assert process.wait(60) == 0
        process.stdout.close()


def test_keys_let_a_client_in_and_the_printed_line_asks_for_them(tmp_path: Path) -> None:
    assert main(["keys", str(tmp_path / "keys"), "--json"]) == 0
    words = ["memory:", *SMALL, "--listen=tcp://0.0.0.0:*", f"--keys={tmp_path / 'keys'}"]
    with PlaneProcess(words) as process:
        assert process.ready["secured"]
        assert 'keys="FOLDER"' in process.ready["rank"]
        assert "0.0.0.0" not in process.ready["worker"]
        port = process.url.rpartition(":")[2]
        with ps.open(f"tcp://127.0.0.1:{port}", keys=tmp_path / "keys") as line:
            put(line, "a")
            assert line.ledger.accepted == 2


# ------------------------------------------------------------------ top


def test_top_shows_a_plane_once(plane: PlaneProcess, capsys: pytest.CaptureFixture[str]) -> None:
    text = out(capsys, "top", plane.url, "--once")
    assert "10 accepted = 6 held + 4 committed (balanced)" in text
    assert "5 groups, 10 samples, 30 tokens, 2 steps" in text
    assert "waiting    the plane for rank 0 to join\n" in text
    assert "3 too long" in text


def test_top_shows_the_same_of_the_folder(plane: PlaneProcess, capsys: pytest.CaptureFixture[str]) -> None:
    live = json.loads(out(capsys, "top", plane.url, "--json"))
    cold = json.loads(out(capsys, "top", plane.ready["folder"], "--json"))
    for name in ("totals", "ledger", "epoch", "next_step", "policy_version", "held_groups", "held_bytes"):
        assert cold[name] == live[name], name
    assert "10 accepted" in out(capsys, "top", plane.ready["folder"], "--once")


def test_rates_are_differences_over_time_and_none_across_a_restart() -> None:
    before = {"epoch": 1, "totals": {"groups": 0, "samples": 0, "tokens": 0, "steps": 1}}
    after = {"epoch": 1, "totals": {"groups": 10, "samples": 40, "tokens": 1000, "steps": 2}}
    assert top.rates(before, after, 2.0) == {"groups": 5.0, "samples": 20.0, "tokens": 500.0, "steps": 0.5}
    assert top.rates(before | {"epoch": 2}, after, 2.0) == {}
    assert top.rates({}, after, 2.0) == {}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"phase": "failed"}, "every rank for the trainer to be restarted"),
        ({"phase": "forming", "waiting_for": "rank 1 to join"}, "the plane for rank 1 to join"),
        ({"waiting_for": "the trainer"}, "producers and plane for the trainer"),
        ({"waiting_for": "generation: 1 of 4 groups"}, "ranks for generation: 1 of 4 groups"),
        ({"producers_waiting": 1200, "oldest_wait_s": 3.4}, "; 1,200 puts for room, the first for 3 s"),
    ],
)
def test_it_says_who_waits_for_whom(change: dict[str, object], text: str) -> None:
    now = {"source": "plane", "phase": "running", "missing": [], "waiting_for": ""} | change
    assert text in top._waiting(now)


def watch_in_terminal(*words: str, hide_rich: bool = False, term: str = "xterm") -> str:
    """What `penstock top` draws on a terminal until Ctrl-C."""
    code = "import sys; sys.modules['rich'] = None; " if hide_rich else "import sys; "
    # A shell that runs its jobs in the background has them ignore SIGINT, and children inherit that.
    code += "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "from penstock.cli import main; sys.exit(main(sys.argv[1:]))"
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", code, "top", *words, "--interval=0.1"]
    process = subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE, env=os.environ | {"TERM": term})
    os.close(theirs)
    seen = b""
    try:
        while seen.count(b"steps/s") < 2:
            seen += os.read(ours, 1 << 16)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        assert process.stderr is not None
        process.stderr.close()
    return seen.decode()


@pytest.mark.parametrize("hide_rich", [False, True])
def test_top_redraws_its_page_on_a_terminal(plane: PlaneProcess, hide_rich: bool) -> None:
    drawn = watch_in_terminal(plane.url, hide_rich=hide_rich)
    assert "0.0 steps/s" in drawn
    assert ("╭" in drawn) == (not hide_rich)
    assert ("\x1b[H\x1b[J" in drawn) == hide_rich


def test_top_prints_its_pages_on_a_terminal_that_cannot_redraw(plane: PlaneProcess) -> None:
    drawn = watch_in_terminal(plane.url, term="dumb")
    assert "\x1b" not in drawn and drawn.count("waiting    the plane for rank 0 to join\r\n") >= 2


def test_top_of_nothing_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", str(tmp_path), "--once"]) == 1
    assert "no log.sqlite in it" in capsys.readouterr().err
    assert main(["top", str(tmp_path), "--interval", "0"]) == 1


# ------------------------------------------------------------------ inspect


def test_inspect_reads_a_run_beside_its_plane(plane: PlaneProcess, capsys: pytest.CaptureFixture[str]) -> None:
    text = out(capsys, "inspect", plane.ready["folder"])
    assert "epoch 1, session 1, next step 3, policy version 2" in text
    assert "10 accepted = 6 held + 4 committed (balanced)" in text
    assert re.search(r"^2 +committed +1 +2 +6 +2 ", text, re.MULTILINE)
    assert "\x1b" not in text and r"bad\u202ename" in text
    report = json.loads(out(capsys, "inspect", plane.ready["folder"], "--json"))
    assert [step["state"] for step in report["steps"]] == ["committed", "committed"]
    assert [group["state"] for group in report["groups"]][2:] == ["held", "held", "held"]
    with ps.open(plane.url) as line:
        assert report["ledger"] == line.status()["ledger"]


def test_inspecting_a_run_changes_nothing_in_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with ps.open(folder, ranks=1, seq_len=64, groups_per_step=1) as line:
        put(line, "a")
    before = {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert read_run(folder)["ledger"]["held"] == 2
    assert {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_killed_planes_folder_is_read_with_all_it_acknowledged(tmp_path: Path) -> None:
    process = PlaneProcess([str(tmp_path / "run"), *SMALL, "--listen=tcp://127.0.0.1:*"])
    with ps.open(process.url) as line:
        put(line, "a")
        process.kill()
    found = read_run(tmp_path / "run")
    assert found["ledger"]["held"] == 2
    assert found["files"]["log.sqlite-wal"] > 0


def test_long_runs_are_shown_by_their_end(tmp_path: Path) -> None:
    with ps.open(tmp_path / "run", ranks=1, seq_len=64, groups_per_step=1) as line:
        for number in range(25):
            put(line, f"g{number}")
        train(line, 23)
    text = inspect.run_report(tmp_path / "run", as_json=False)
    assert "... and the steps before 4; --json lists all" in text
    assert "... and 5 groups before them; --json lists all" in text
    assert len(json.loads(inspect.run_report(tmp_path / "run", as_json=True))["steps"]) == 23


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"no log\.sqlite"):
        read_run(tmp_path)
    (tmp_path / "log.sqlite").write_bytes(b"not a database at all" * 100)
    with pytest.raises(CorruptFile, match="file is not a database"):
        read_run(tmp_path)


# ------------------------------------------------------------------ keys


def test_keys_are_made_added_and_never_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "keys"
    text = out(capsys, "keys", str(folder))
    assert "to client: plane.key, client.key, client.secret" in text
    plane_secret = (folder / "plane.secret").read_bytes()
    assert main(["keys", str(folder)]) == 1
    assert "name the clients to add" in capsys.readouterr().err
    made = json.loads(out(capsys, "keys", str(folder), "--client", "trainer", "--json"))["made"]
    assert [Path(path).name for path in made] == ["trainer.secret", "trainer.key", "trainer.key"]
    assert (folder / "plane.secret").read_bytes() == plane_secret
    assert main(["keys", str(folder), "--client", "trainer"]) == 1
    for path in folder.rglob("*.secret"):
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.read_text().strip() not in text


@pytest.mark.parametrize("name", ["../x", "plane", "", "a/b", ".hidden", "a b"])
def test_client_names_cannot_leave_the_folder(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", str(tmp_path / "keys"), f"--client={name}"]) == 1
    assert not (tmp_path / "keys").exists()


# ------------------------------------------------------------------ doctor


@pytest.mark.release
def test_doctor_imports_every_extra_and_finds_this_machine_healthy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = out(capsys, "doctor", str(tmp_path), "--imports")
    assert "Everything essential works." in page and "extras      imported: " in page
    assert max(map(len, page.splitlines())) <= 120


def test_doctor_wraps_what_it_found() -> None:
    many = doctor.Finding(name="extras", verdict="ok", text=f"imported: {', '.join(['tensorboard'] * 40)}")
    lines = doctor._line(many).splitlines()
    assert len(lines) > 3 and max(map(len, lines)) <= 100
    assert lines[1].startswith(" " * len("ok    extras      ") + "tensorboard")


@pytest.mark.process
def test_doctor_imports_no_extra_and_prints_each_line_as_soon_as_it_knows_it() -> None:
    program = "import sys; from penstock.cli import main; main(['doctor']); print(*sys.modules, file=sys.stderr)"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    chunks = []
    while chunk := os.read(process.stdout.fileno(), 1 << 16):  # what one write put into the pipe, or several
        chunks.append(chunk.decode())
    loaded = process.communicate()[1].decode().split()
    assert process.returncode == 0 and len(chunks) > 1, chunks
    assert "ok    extras      installed: " in "".join(chunks)
    assert not {"torch", "transformers", "ray", "tinker"} & {*loaded}


@pytest.mark.usefixtures("few_extras")
def test_doctor_finds_this_machine_healthy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "Everything essential works." in out(capsys, "doctor", str(tmp_path))
    report = json.loads(out(capsys, "doctor", str(tmp_path / "not" / "yet"), "--json"))
    assert report["healthy"] is True
    names = [finding["name"] for finding in report["findings"]]
    assert {"python", "loopback", "keys", "disk", "open files"} <= set(names)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("few_extras")
def test_doctor_fails_where_runs_cannot_be_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert "FAIL  disk" in out(capsys, "doctor", "/proc", code=1)


@pytest.mark.usefixtures("few_extras")
def test_a_check_that_breaks_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zmq.curve_keypair", lambda: 1 / 0)
    broken = [finding for finding in doctor.examine(tmp_path) if finding.verdict == "failure"]
    assert [(finding.name, finding.text) for finding in broken] == [("curve", "ZeroDivisionError: division by zero")]
