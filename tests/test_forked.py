"""Programs of the tests that are forked: they run, end and die as those that are started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.forked import Forked
from tests.support.ports import free_port

pytestmark = pytest.mark.process

PROGRAM = """
import os, signal, sys, time

def main(words):
    print(os.getcwd(), os.environ["WORD"], *words, flush=True)
    print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, file=sys.stderr)
    return 3
"""


def test_it_has_the_folder_the_environment_and_the_output_of_the_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "small_program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORD", "of the test")
    with Path("out").open("wb") as out, Path("err").open("wb") as err:
        process = Forked("small_program", ["a", "b"], stdout=out.fileno(), stderr=err.fileno())
        assert process.wait(60) == process.poll() == 3
    assert Path("out").read_text() == f"{tmp_path} of the test a b\n"
    assert Path("err").read_text() == "True\n"


def test_it_is_killed_and_what_fails_says_so(tmp_path: Path) -> None:
    timeouts = json.dumps({"plane_s": 600})
    words = ["rank", f"tcp://127.0.0.1:{free_port()}", "0", "1", "1", timeouts, f"--parent={os.getpid()}"]
    process = Forked("tests.support.farm", words)
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.kill()
    assert process.wait(60) == -signal.SIGKILL
    process.send_signal(signal.SIGKILL)  # nothing happens: its number may be another process's by now
    with (tmp_path / "err").open("wb") as err:
        assert Forked("tests.support.farm", ["juggler"], stderr=err.fileno()).wait(60) == 2
    assert "invalid choice: 'juggler'" in (tmp_path / "err").read_text()
