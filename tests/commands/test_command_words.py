"""The command line as one meets it: the overview, help at 80 columns, suggestions, a sign of life."""

from __future__ import annotations

import argparse
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.cli import COMMANDS, GROUPS, main, overview
from penstock.commands import demo
from penstock.commands.terminal import QUIET_S, fitted

pytestmark = pytest.mark.process


def test_alone_it_lists_the_commands_in_four_groups_and_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = capsys.readouterr().out
    assert shown == overview() and re.findall(r"^(\w+):$", shown, re.M) == ["try", "run", "look", "check"]
    assert re.findall(r"^  (\w+)  ", shown, re.M) == list(COMMANDS) == [c for group in GROUPS.values() for c in group]
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_and_fits_80_columns(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0 and [line for line in text.splitlines() if len(line) > 80] == []
    assert f"penstock {command} " in text.split("usage:", 1)[1].split("\n", 2)[2]


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["demmo"], "demo"),
        (["serv", "runs/x"], "serve"),
        (["serve", "runs/x", "--seqlen", "64"], "--seq-len"),
        (["view", "runs/x", "--tokeniser=x"], "--tokenizer"),
        (["storage", "chekc", "runs/x"], "check"),
        (["top", "--inteval", "3"], "--interval"),
        (["rollouts", "verifiers", "--grop-size=3"], "--group-size"),
        (["storage", "check", "runs/x", "--fats"], "--fast"),
        (["bench", "wrie"], "wire"),
        (["rollouts", "verifers"], "verifiers"),
        (["rollouts", "verifiers", "env", "--plane", "x", "--enpoint", "y"], "--endpoint"),
    ],
)
def test_a_near_miss_is_one_line_with_what_was_meant(
    words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(words)
    except SystemExit as stopped:
        code = int(str(stopped.code))
    error = capsys.readouterr().err
    assert code == 2 and error.count("\n") == 1
    assert f"did you mean '{meant}'?" in error and error.rstrip().endswith("--help")


@pytest.mark.parametrize("words", [["serve"], ["serve", "runs/x", "--ranks", "2"], ["convert"], ["convert", "a.jsonl"]])
def test_missing_words_exit_with_2_and_make_nothing(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert list(tmp_path.iterdir()) == []


def test_the_summary_of_a_demo_fits_80_columns() -> None:
    ledger = {
        "accepted": 123_456,
        "committed": 100_000,
        "held": 20_000,
        "scheduled": 3,
        "delivered": 0,
        "uses": 200_000,
    }
    ledger_of: dict[str, object] = {**ledger, "dropped": {"stale": 3_000, "evicted": 453}, "balanced": True}
    report = {
        "learned": True,
        "reward_first": 0.1,
        "reward_last": 0.9,
        "steps": 400,
        "seconds": 123.0,
        "tokens": 9_999_999,
        "shared_tokens": 8_888_888,
        "on_policy_gap": 1e-7,
        "ledger": ledger_of,
        "kills": {"plane": 3, "rank": 2},
    }
    config = demo.config_of(_demo_arguments())
    text = demo._closing(report, config, (demo._CHAOS_NEXT, demo._CONFIG_NEXT))
    assert [line for line in text.splitlines() if len(line) > 80] == []


def _demo_arguments() -> argparse.Namespace:

    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args(["--folder", "runs/a-rather-long-name-for-a-folder-of-a-run"])


def test_long_words_are_not_torn() -> None:
    path = "runs/" + "x" * 90
    assert path in fitted(f"Everything is in {path}.", 80)


SLOW = """
import sys, threading
from penstock.commands.terminal import FirstSign
with FirstSign("storage"):
    threading.Event().wait(float(sys.argv[1]))
    print("ready")
"""


def _on_a_terminal(seconds: float, term: str = "xterm") -> str:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", SLOW, str(seconds)]
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=os.environ | {"TERM": term}) as process:
        os.close(theirs)
        text = "".join(_read(ours))
        assert process.wait(60) == 0
    os.close(ours)
    return text


def _read(descriptor: int) -> Iterator[str]:
    while True:
        try:
            found = os.read(descriptor, 4096)
        except OSError:  # the other end is closed
            return
        if not found:
            return
        yield found.decode()


def test_a_command_that_is_silent_for_two_seconds_shows_that_it_works() -> None:
    text = _on_a_terminal(QUIET_S + 2)
    assert "penstock storage: working, 2 s" in text
    assert text.endswith("\r\x1b[Kready\r\n")  # the line is cleared before the command prints


def test_a_terminal_that_cannot_redraw_gets_no_control_characters() -> None:
    assert _on_a_terminal(QUIET_S + 1, term="dumb") == "ready\r\n"


def test_a_quick_command_shows_nothing_of_that() -> None:
    assert _on_a_terminal(0) == "ready\r\n"


HINT = re.compile(r"`penstock ([a-z]+)((?:[^`\"]|\"\s*f?\")*)`")
"""A command in a message; it may go on in the next string of the source."""


def test_every_command_that_a_message_names_exists_with_its_flags(
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = Path(demo.__file__).parent.parent
    hints = [(path.name, *found) for path in root.rglob("*.py") for found in HINT.findall(path.read_text())]
    assert len(hints) > 40
    helps = {}
    for where, command, rest in hints:
        assert command in COMMANDS, f"{where}: penstock {command}"
        if command not in helps:
            with pytest.raises(SystemExit):
                main([command, "--help"])
            helps[command] = capsys.readouterr().out
        if command == "rollouts":  # its kinds have flags of their own
            continue
        for flag in re.findall(r"--[a-z-]+", rest):
            assert flag in helps[command], f"{where}: penstock {command} {flag}"
