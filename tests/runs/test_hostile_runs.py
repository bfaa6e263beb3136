"""A run of a stranger, or a damaged one: whatever its log holds, a command says one sentence, in bounded memory."""

from __future__ import annotations

import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from penstock.cli import main
from penstock.errors import CorruptFile
from penstock.log import SqliteLog
from penstock.runs.recorded_run import RecordedRun
from tests.support.attacks import archive


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "honest"
    archive(folder)
    return folder


ODD = {
    "settings that are no TOML": "UPDATE meta SET value = '=[' WHERE name LIKE 'settings %'",
    "settings that are bytes": "UPDATE meta SET value = x'ff00' WHERE name LIKE 'settings %'",
    "settings of no decision": "UPDATE meta SET name = 'settings x' WHERE name LIKE 'settings %'",
    "settings that nest": "UPDATE meta SET value = 'a=' || replace(hex(zeroblob(9000)), '0', '[') WHERE name > 'set'",
    "a step that is text": "UPDATE meta SET value = 'x' WHERE name = 'next_step'",
    "transactions that are text": "UPDATE meta SET value = 'x' WHERE name = 'commits'",
    "an epoch that is text": "UPDATE meta SET value = 'x' WHERE name = 'epoch'",
    "a time that is no time": "UPDATE groups SET at = 9e999",
    "a time of this year 1e300": "UPDATE groups SET at = 1e300",
    "a state that is none": "UPDATE groups SET state = 99",
    "a location that is none": "UPDATE groups SET location = 'x'",
    "a manifest that is none": "UPDATE steps SET manifest = x'ff'",
    "a manifest that is a number": "UPDATE steps SET manifest = 3",
    "metadata that is none": "UPDATE facts SET facts = x'ff'",
    "a record that is none": "INSERT INTO records VALUES (777, x'ff')",
    "a storage with a NUL in its name": "INSERT OR REPLACE INTO meta VALUES ('storage', 'a' || char(0) || 'b')",
    "a group's id in bytes": "UPDATE groups SET id = x'ff'",
    "tokens that are text": "UPDATE groups SET tokens = 'x'",
    "a location in bytes": "UPDATE groups SET location = x'ff'",
    "a time that is text": "UPDATE groups SET at = 'x'",
    "an id that paints": "UPDATE groups SET id = char(27) || '[2J'",
    "an id of the run that paints": "UPDATE meta SET value = char(27) || '[2J' WHERE name = 'run_id'",
    "a step before the first": "UPDATE steps SET step = -1",
    "no table": "DROP TABLE records",
}
COMMANDS = (
    ["rerun"],
    ["rerun", "--diff"],
    ["rerun", "--verify"],
    ["inspect"],
    ["storage", "check"],
    ["copy"],
    ["convert"],
)


@pytest.mark.parametrize("change", ODD.values(), ids=ODD)
def test_a_command_says_what_is_wrong(
    honest: Path, tmp_path: Path, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(honest, folder)
    with closing(sqlite3.connect(folder / "log.sqlite")) as log:
        log.execute(change)
        log.commit()
    targets = {"copy": [str(tmp_path / "copied")], "convert": [str(tmp_path / "samples.jsonl")]}
    codes = set()
    for command, *flags in COMMANDS:
        codes.add(main([command, *flags, str(folder), *targets.get(command, [])]))
        said = capsys.readouterr()
        assert len(said.err) < 2000 and "\x1b" not in said.out + said.err
    assert codes & {1, 2}  # an exception would have ended this test


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (".".join(["a"] * 1000) + " = 1", "999 dots in a line; at most 1048576 and 500 are read"),
        ("a = " + "[" * 100_000, "the recorded settings cannot be read"),
    ],
    ids=["names", "lists"],
)
def test_settings_of_very_deep_names_are_rejected_unread(
    honest: Path, tmp_path: Path, settings: str, message: str
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(honest, folder)
    with closing(sqlite3.connect(folder / "log.sqlite")) as log:
        log.execute("UPDATE meta SET value = ? WHERE name LIKE 'settings %'", (settings,))
        log.commit()
    with pytest.raises(CorruptFile, match=message):
        RecordedRun.open(folder)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            "ALTER TABLE groups RENAME TO kept; CREATE VIEW groups AS WITH RECURSIVE x AS "
            "(SELECT * FROM kept UNION ALL SELECT * FROM x) SELECT * FROM x",
            "holds view 'groups', which no plane makes",
        ),
        (
            "CREATE TRIGGER odd AFTER UPDATE ON meta BEGIN DELETE FROM groups; END",
            "holds trigger 'odd', which no plane makes",
        ),
    ],
    ids=["view", "trigger"],
)
def test_a_log_with_views_or_triggers_is_rejected(
    honest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], script: str, message: str
) -> None:
    """A view in the place of a table that has no end, and a trigger that deletes what a plane is about to need."""
    folder = tmp_path / "run"
    shutil.copytree(honest, folder)
    with closing(sqlite3.connect(folder / "log.sqlite")) as log:
        log.executescript(script)
    for command in (["rerun"], ["inspect"]):
        assert main([*command, str(folder)]) == 1
        assert message in capsys.readouterr().err
    with pytest.raises(CorruptFile, match=message):
        SqliteLog(folder)


def test_a_decision_about_a_group_that_is_none_is_named(
    honest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(honest, folder)
    with closing(sqlite3.connect(folder / "log.sqlite")) as log:
        log.execute("UPDATE steps SET op = op + 100")
        log.execute("INSERT INTO records VALUES (50, ?)", (msgspec.msgpack.encode(["quarantine", {99: "why"}]),))
        log.commit()
    assert main(["rerun", str(folder), "--diff"]) == 1
    # With the line that failed: it may be our bug, and one sentence has no traceback.
    assert re.search(
        r"its log holds values that no plane writes: KeyError: 99 \(\w+\.py, line \d+\)", capsys.readouterr().err
    )


def test_a_bug_in_what_a_command_prints_does_not_pass_for_a_damaged_log(
    honest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bug(*_: object) -> list[str]:
        raise TypeError("a bug")

    monkeypatch.setattr("penstock.commands.storage.check_lines", bug)
    monkeypatch.setattr("penstock.commands.copy.size", bug)
    for words in (["storage", "check", str(honest)], ["copy", str(honest), str(tmp_path / "copy")]):
        with pytest.raises(TypeError, match="a bug"):
            main(words)
