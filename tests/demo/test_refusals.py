"""A run that cannot start says why at once, with exit code 1. A process that dies is always reported."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.demo.launch import Launcher, RunFailed, check_surroundings
from penstock.errors import ConfigError, Conflict
from penstock.log import SqliteLog
from penstock.packing import Packing
from penstock.train.run_config import ModelConfig, TaskConfig, TrainConfig

pytestmark = pytest.mark.process

TINY = {
    "vocab_size": 12,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        yield int(listener.getsockname()[1])


def train(folder: Path, text: str) -> int:
    path = folder / "my.toml"
    path.write_text(f'folder = "{folder}/run"\n{text}\n[task]\n')
    return main(["train", str(path)])


def test_a_model_that_is_not_there_is_said_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path, '[model]\npath = "/no/model"') == 1
    said = capsys.readouterr()
    assert said.err == (
        "penstock train: model.path: '/no/model' has no config.json; give the folder of a saved model\n"
    )
    assert said.out == ""
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("setting", ["listen", "prometheus"])
def test_an_address_that_another_process_has_is_refused_before_anything_starts(
    setting: str, tmp_path: Path, busy_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"tcp://127.0.0.1:{busy_port}" if setting == "listen" else f"127.0.0.1:{busy_port}"
    assert train(tmp_path, f'{setting} = "{address}"') == 1
    said = capsys.readouterr()
    assert said.err == f"penstock train: {setting}: '{address}': another process listens there; use another port\n"
    assert "Groups are accepted" not in said.out
    assert not (tmp_path / "run").exists()


def test_a_socket_in_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder; make it"):
        check_surroundings(TrainConfig(folder=str(tmp_path), listen=(f"ipc://{tmp_path}/none/x.sock",)))


def test_a_folder_that_is_a_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "file"
    path.touch()
    assert main(["demo", "--folder", str(path)]) == 1
    assert f"folder: '{path}': File exists; give a folder that can be made" in capsys.readouterr().err


def test_a_folder_in_which_a_run_is_at_work_is_refused(tmp_path: Path) -> None:
    config = TrainConfig(folder=str(tmp_path))
    log = SqliteLog(tmp_path / "plane")
    try:
        with pytest.raises(Conflict, match="this process has it open already"):
            check_surroundings(config)
    finally:
        log.close()
    check_surroundings(config)


@pytest.mark.parametrize("steps", ["-3", "0", "many"])
def test_a_number_of_steps_that_cannot_be_trained_is_a_bad_command_line(
    steps: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["demo", f"--steps={steps}"])
    assert stopped.value.code == 2
    assert f"argument --steps: {steps}; must be 1 or more" in capsys.readouterr().err


@pytest.mark.timeout(600)
def test_a_model_that_cannot_be_built_is_the_error_of_the_run(tmp_path: Path) -> None:
    config = TrainConfig(folder=str(tmp_path), model=ModelConfig(family="nope"), task=TaskConfig())
    with pytest.raises(RunFailed, match="model: cannot build 'nope'"):
        Launcher(config).run(lambda _: None)


@pytest.mark.timeout(600)
def test_a_process_that_keeps_dying_ends_the_run_with_the_end_of_its_log(tmp_path: Path) -> None:
    """The trainer's ranks find a checkpoint that is none, which no check before the start looks into."""
    model = ModelConfig(family="qwen3", config=TINY)
    broken = tmp_path / "checkpoints" / "step_00000001"
    broken.mkdir(parents=True)
    for name in ("rank_0.safetensors", "state.json", "model.safetensors", "done"):
        (broken / name).write_bytes(b"no checkpoint")
    packing = Packing(ranks=1, seq_len=64)
    config = TrainConfig(folder=str(tmp_path), packing=packing, model=model, task=TaskConfig(workers=1))
    with pytest.raises(RunFailed, match="rank-0"):
        Launcher(config).run(lambda _: None)


def run_main(body: str, *, stdout: int) -> subprocess.CompletedProcess[str]:
    program = f"import sys\nimport penstock.cli as cli\nfrom penstock.commands import inspect\n{body}\n"
    program += "sys.exit(cli.main(['inspect', 'x']))"
    return subprocess.run(
        [sys.executable, "-c", program], stdout=stdout, stderr=subprocess.PIPE, text=True, check=False
    )


BROKEN = "def run(args): raise BrokenPipeError(32, 'Broken pipe')\ninspect.run = run"


def test_a_pipe_that_breaks_inside_is_an_error() -> None:
    done = run_main(BROKEN, stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "penstock inspect: Broken pipe\n")


@pytest.mark.parametrize("body", ["print('x', flush=True)", "print('x')", "print('x' * 100_000)"])
def test_a_reader_that_went_away_is_no_error(body: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = run_main(f"def run(args):\n    {body}\n    return 0\ninspect.run = run", stdout=writing)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_vision_model_without_a_layout_is_found_before_anything_starts(tmp_path: Path) -> None:
    model = ModelConfig(family="qwen2_vl", config={"vision_config": {"depth": 1}})
    with pytest.raises(ConfigError, match=r"model\.image_processor: not given"):
        check_surroundings(TrainConfig(folder=str(tmp_path), model=model))
    given = ModelConfig(family="qwen2_vl", config={"vision_config": {}}, image_processor={"patch_size": 14})
    check_surroundings(TrainConfig(folder=str(tmp_path), model=given))
