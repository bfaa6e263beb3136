"""`pytest --workers` runs tests in processes that are forked once all are collected."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parent.parent
SHARED = """
import os, pytest

@pytest.fixture(scope="session")
def opened():
    print("opened")
    yield
    with open(os.environ["CLOSED"], "a") as file:
        file.write("closed\\n")
"""
FIRST = """
import os, signal

def test_passes(opened, tmp_path): (tmp_path / "x").write_text("")
def test_fails(opened): print("what it printed"); assert 1 == 2
def test_dies(): os.kill(os.getpid(), signal.SIGKILL)
def test_behind_it(opened): pass
"""
SECOND = "def test_one(opened): pass\ndef test_two(opened): pass\n"


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    pytest = [sys.executable, "-m", "pytest", "-p", "tests.support.workers", "-p", "no:cacheprovider", "-q"]
    folders = [f"--rootdir={folder}", f"--basetemp={folder / 'temporary'}", "-c", "/dev/null"]
    environment = {"PYTHONPATH": str(ROOT), "CLOSED": str(folder / "closed"), "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        [*pytest, *folders, *words, folder], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {"conftest": SHARED, "test_first": FIRST, "test_second": SECOND}
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def test_reports_are_those_of_one_process_and_a_dead_worker_fails_its_test(folder: Path) -> None:
    done = run(folder, "--workers=2")
    assert done.returncode == 1 and "2 failed, 4 passed" in done.stdout, done.stdout + done.stderr
    assert "what it printed" in done.stdout and "assert 1 == 2" in done.stdout
    assert "the worker ended with -9 while it ran this test" in done.stdout
    assert done.stdout.count("failed, ") == 1, "only the first process says how it ended"
    assert set((folder / "closed").read_text().split()) == {"closed"}, "workers that live end their fixtures"


def test_the_first_failure_ends_all_workers(folder: Path) -> None:
    done = run(folder, "--workers=2", "--maxfail=1")
    assert done.returncode == 1 and "stopping after 1 failures" in done.stdout, done.stdout + done.stderr
