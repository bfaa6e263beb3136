"""`penstock rollouts`: what it prints, how it ends, and what it says when something is wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import httpx
import pytest

import penstock as ps
from penstock.cli import main
from penstock.client import Plane
from penstock.demo.endpoint import Endpoint, Engine, save_model
from tests.support.plane_processes import wait_until
from tests.train.ranks import CONTEXT

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore")]
TASKSETS = Path(__file__).parent.parent / "integrations" / "tasksets"


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    with Endpoint(Engine(save_model(tmp_path_factory.mktemp("model") / "tiny"))) as found:
        yield found


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Plane]:
    with ps.open(tmp_path / "run", ranks=1, seq_len=64, groups_per_step=2, listen=[f"ipc://{tmp_path}/s"]) as found:
        yield found


def words(endpoint: Endpoint, tmp_path: Path) -> list[str]:
    given = f"--endpoint {endpoint.url} --plane ipc://{tmp_path}/s --runtime subprocess --group-size 4 --max-tokens 5"
    return ["rollouts", "verifiers", "reverse-words", *given.split()]


def test_groups_are_put_and_counted(
    endpoint: Endpoint,
    plane: Plane,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(TASKSETS)  # a module of the current folder
    assert main([*words(endpoint, tmp_path), "--groups", "2", "--set", "taskset.words=3"]) == 0
    said = capsys.readouterr().out
    assert re.fullmatch(r"reverse-words: 2 groups put, 8 rollouts, \d+ tokens, mean reward 0\.\d{3}\n", said)
    assert plane.ledger.held == 8
    assert main([*words(endpoint, tmp_path), "--groups", "1", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["groups"] == 1 and captured.err == ""


class Command:
    """A command in a process of its own, forked from one that has imported transformers."""

    def __init__(self, arguments: list[str], folder: Path, output: Path) -> None:
        self.out, self.err = output / "out", output / "err"
        self._process = CONTEXT.Process(target=_run_command, args=(arguments, folder, self.out, self.err))

    def __enter__(self) -> Self:
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()

    def interrupted(self) -> tuple[int | None, str, str]:
        """Interrupt it. Returns its exit code and what it printed."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGINT)
        self._process.join(60)
        return self._process.exitcode, self.out.read_text(), self.err.read_text()


def _run_command(arguments: list[str], folder: Path, out: Path, err: Path) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    warnings.simplefilter("ignore")
    os.chdir(folder)
    sys.path.insert(0, "")  # as `python -m` has it
    with out.open("w", buffering=1) as stdout, err.open("w", buffering=1) as stderr:
        sys.stdout, sys.stderr = stdout, stderr
        code = main(arguments)
    os._exit(code)


def test_an_interrupt_ends_it_with_130_and_says_what_was_put(endpoint: Endpoint, plane: Plane, tmp_path: Path) -> None:
    with Command(words(endpoint, tmp_path), TASKSETS, tmp_path) as command, plane.source(rank=0) as source:
        source.step(timeout=240)  # two groups have come
        code, out, err = command.interrupted()
    assert code == 130, err
    found = re.fullmatch(r"reverse-words: ([\d,]+) groups put, .*\n", out)
    assert found, out + err
    assert "Traceback" not in err
    # What it says was put is there; a group that was under way may be as well.
    assert plane.ledger.accepted >= 4 * int(found[1].replace(",", "")) >= 4


@pytest.mark.parametrize("extra", [["--groups", "1"], ["--groups", "2", "--max-failures", "100"], ["--groups", "5"]])
def test_a_run_in_which_everything_failed_ends_with_1_and_the_first_reason(
    endpoint: Endpoint,
    plane: Plane,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    extra: list[str],
) -> None:
    monkeypatch.chdir(TASKSETS)
    assert main([*words(endpoint, tmp_path), *extra, "--set", "taskset.broken=true"]) == 1
    said = capsys.readouterr().err.splitlines()  # on a slow machine, progress comes before the error
    assert "the grader is down" in said[-1]
    assert [line.startswith("penstock rollouts: ") for line in said] == [False] * (len(said) - 1) + [True]
    assert plane.ledger.accepted == 0 and plane.ledger.discarded["rollout failed"] >= 4


def test_filters_are_flags_and_what_they_drop_is_counted(
    endpoint: Endpoint,
    plane: Plane,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(TASKSETS)
    given = [*words(endpoint, tmp_path), "--groups", "3"]
    # Four times the same task with one sampled token: some groups have no variance, and most answers are cut.
    assert main([*given, "--max-tokens", "1", "--drop-truncated", "--drop-zero-variance"]) == 0
    assert re.search(r"groups put, .* groups not put", capsys.readouterr().out)
    dropped = plane.ledger.discarded
    assert dropped["truncated"] > 0 and plane.ledger.accepted + sum(dropped.values()) == 12
    assert main([*given, "--evaluation", "--drop-truncated"]) == 1
    assert "filters: 1; leave them out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["--plane", "runs/x"], "--plane runs/x: not an address"),
        (["--endpoint", "http://127.0.0.1:1/v1"], "endpoint http://127.0.0.1:1/v1: ConnectError"),
        (["--group-size", "0"], "group_size: 0; must be at least 1"),
        (["--set", "words"], "--set 'words': must be KEY=VALUE"),
        (["--assets", "x"], "--assets and --image-model: give both"),
        (["--assets", "x", "--image-model", "nowhere"], "--image-model nowhere: "),
    ],
)
def test_what_is_wrong_is_one_line(
    endpoint: Endpoint,
    plane: Plane,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    extra: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(TASKSETS)
    assert main([*words(endpoint, tmp_path), *extra]) == 1
    captured = capsys.readouterr()
    err = captured.err
    assert captured.out == "" and err.startswith("penstock rollouts: ") and said in err and err.count("\n") == 1


@pytest.mark.parametrize("kind", ["verifiers", "endpoint", "annotate"])
def test_every_kind_explains_itself_with_examples(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["rollouts", kind, "--help"])
    assert stopped.value.code == 0
    assert f"  penstock rollouts {kind} " in capsys.readouterr().out


def test_the_endpoint_is_written_and_served_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "tiny"
    assert main(["rollouts", "endpoint", str(folder), "--write-model"]) == 0
    assert "penstock rollouts endpoint" in capsys.readouterr().out
    assert main(["rollouts", "endpoint", str(tmp_path)]) == 1
    assert "no config.json; give a model's folder" in capsys.readouterr().err
    with Endpoint(Engine(folder)) as other:
        port = other.url.rpartition(":")[2].removesuffix("/v1")
        assert main(["rollouts", "endpoint", str(folder), "--port", port]) == 1
        assert "use another port, or 0 for a free one" in capsys.readouterr().err


def test_an_interrupt_ends_the_endpoint_with_130(endpoint: Endpoint, tmp_path: Path) -> None:
    with Command(["rollouts", "endpoint", endpoint.engine.name, "--port=0"], tmp_path, tmp_path) as command:
        wait_until(lambda: command.out.exists() and command.out.read_text().endswith("\n"))
        url = command.out.read_text().rpartition(" at ")[2].strip()
        assert httpx.get(f"{url}/models", timeout=120).json()["data"][0]["id"] == endpoint.engine.name
        code, _, err = command.interrupted()
    assert code == 130 and "Traceback" not in err, err
