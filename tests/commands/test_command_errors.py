"""What commands say of a wrong word, file or address: which one it was, and what to do, in one line."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock as ps
from penstock.cli import main
from penstock.commands import doctor, which_run
from penstock.errors import ConfigError
from penstock.transport.sockets import check_url
from tests.support.exports import make_export
from tests.support.plane_processes import SMALL

pytestmark = pytest.mark.process

INTERRUPTIBLE = """
import signal, sys
from penstock.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its background jobs ignore it
sys.exit(main(sys.argv[1:]))
"""


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 1) -> str:
    """The one line on stderr, without the command's name; a plane may log above it what it tidied up."""
    assert main(words) == code
    lines = capsys.readouterr().err.splitlines(keepends=True)
    text = "".join(line for line in lines if " INFO penstock." not in line)
    assert text.startswith(f"penstock {words[0]}: ") and text.count("\n") == 1, text
    assert "Errno" not in text
    return text.removeprefix(f"penstock {words[0]}: ").rstrip()


# ------------------------------------------------------------------ ports


@pytest.mark.parametrize("port", [0, 65536, 99999])
def test_a_port_that_no_host_has_is_refused_wherever_an_address_is_read(port: int) -> None:
    with pytest.raises(ConfigError, match=f"port {port}; must be from 1 to 65535"):
        check_url(f"tcp://127.0.0.1:{port}", secured=False)
    with pytest.raises(ConfigError, match="must be from 1 to 65535"):
        ps.open(f"tcp://127.0.0.1:{port}")
    with pytest.raises(ConfigError, match="must be from 1 to 65535"):
        ps.open("memory:", ranks=1, seq_len=8, groups_per_step=1, listen=[f"tcp://127.0.0.1:{port}"])


def test_serve_and_metrics_refuse_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "port 99999" in said(capsys, "serve", "memory:", *SMALL, "--listen=tcp://127.0.0.1:99999")
    words = ("serve", "memory:", *SMALL, "--listen=tcp://127.0.0.1:*", "--metrics=127.0.0.1:99999")
    assert "must be ADDRESS:PORT" in said(capsys, *words)


@pytest.mark.parametrize("command", ["view", "diff"])
def test_the_viewer_refuses_it_as_a_bad_command_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "a", *(["b"] if command == "diff" else []), "--port=99999"])
    assert stopped.value.code == 2
    assert "argument --port: 99999; must be from 0 (a free port) to 65535" in capsys.readouterr().err


def test_a_port_that_is_taken_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_export(tmp_path / "run", steps=1)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        port = listener.getsockname()[1]
        words = said(capsys, "view", str(tmp_path / "run"), f"--port={port}", "--no-open")
    assert words == f"--port: '127.0.0.1:{port}': Address already in use; use another port, or 0 for a free one"


# ------------------------------------------------------------------ files and folders


IN_THE_WAY = "a file is where a folder should be, or the reverse; move it away"


def test_a_folder_that_cannot_be_made_is_named_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    serve = ("serve", str(file), *SMALL, "--listen=tcp://127.0.0.1:*")
    assert said(capsys, *serve) == f"{file}: File exists; {IN_THE_WAY}"
    assert said(capsys, "keys", str(file)) == f"{file}: File exists; give a folder that can be created and written"
    assert "/proc/x" in said(capsys, "serve", "/proc/x", *SMALL, "--listen=tcp://127.0.0.1:*")


def test_a_configuration_that_is_not_there_says_how_to_write_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = str(tmp_path / "gone")
    assert said(capsys, "train", gone) == f"{gone}: not a file; write one with `penstock demo --write-config {gone}`"


def test_a_run_that_is_not_there_is_answered_with_those_that_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_export(tmp_path / "run", steps=1)
    words = said(capsys, "tokens", str(tmp_path / "run"), "--run", "nope")
    assert words.endswith("no run 'nope'; there are only the folder's own; leave the run out")


@pytest.mark.usefixtures("few_extras")
def test_doctor_says_that_it_tried_another_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", str(tmp_path / "later")])
    assert f"{tmp_path / 'later'} does not exist yet; tried the folder above it" in " ".join(
        capsys.readouterr().out.split()
    )
    (tmp_path / "file").touch()
    assert main(["doctor", str(tmp_path / "file")]) == 1
    assert "file: not a folder" in " ".join(capsys.readouterr().out.split())


def test_doctor_tries_the_packages_of_every_extra_that_is_installed() -> None:
    assert doctor.import_failures(["json", "orjson"]) == {}
    assert doctor.import_failures(["no_such_module_here"])["no_such_module_here"].startswith("ModuleNotFound")


def test_doctor_names_the_package_whose_import_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ends_here.py").write_text("import os; os._exit(7)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    failed = doctor.import_failures(["ends_here", "json", "aaa_not_there"])
    assert failed["ends_here"] == "the process that imported it ended with code 7"
    assert failed.keys() == {"ends_here", "aaa_not_there"}


# ------------------------------------------------------------------ which run

COMMANDS = ("view", "inspect", "top", "tokens", "doctor", "diff", "quarantine")


@pytest.fixture
def laid_out(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A run as `penstock demo` lays it out, with its plane at work, and the plane's address."""
    folder = tmp_path / "run"
    make_export(folder, steps=1)
    with ps.open(folder / "plane", ranks=1, seq_len=8, groups_per_step=1, listen=["tcp://127.0.0.1:*"]) as plane:
        server = plane._server
        assert server is not None
        yield folder, server.urls[1]


def words_for(command: str, where: str) -> list[str]:
    more = {"view": ["--html", "page.html"], "top": ["--once"], "diff": [where]}
    return [command, where, *more.get(command, [])]


@pytest.mark.usefixtures("few_extras")
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_takes_a_runs_folder_its_planes_folder_and_its_address(
    command: str,
    laid_out: tuple[Path, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    folder, url = laid_out
    said = []
    for where in (str(folder), str(folder / "plane"), url):
        assert main(words_for(command, where)) == 0, where
        said.append(capsys.readouterr().out)
    if command not in ("top", "doctor"):  # which ask the plane itself, where it was named
        assert said[0].replace(str(folder), "") == said[1].replace(str(folder), "") == said[2].replace(str(folder), "")


@pytest.mark.parametrize("command", sorted({*COMMANDS} - {"doctor"}))
def test_a_folder_that_is_not_there_is_named_by_every_command(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = str(tmp_path / "nothing")
    assert said(capsys, *words_for(command, where)).startswith(f"{where}: no")


EVERY_PLACE = (
    *([command] for command in (*COMMANDS, "rerun", "tenants", "copy", "serve")),
    *(["storage", action] for action in ("check", "recover", "forget")),
    *(["runs", action] for action in ("list", "delete")),
)


@pytest.mark.parametrize("words", EVERY_PLACE, ids=" ".join)
def test_every_command_rejects_an_empty_path_and_an_address_without_its_scheme(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for where, meant in (("", "empty; was a shell variable unset?"), ("node-1:7440", "give 'tcp://node-1:7440'")):
        with pytest.raises(SystemExit) as stopped:
            main([*words, where])
        assert stopped.value.code == 2 and meant in capsys.readouterr().err


@pytest.mark.parametrize("words", [["assets", "list"], ["keys"], ["train"], ["top", "runs/x", "--keys"]], ids=" ".join)
def test_a_folder_or_file_that_is_empty_text_is_rejected(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*words, ""])
    assert "empty; was a shell variable unset?" in capsys.readouterr().err


def test_a_plane_is_not_served_in_a_folder_named_like_an_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    of_step = ["--ranks", "1", "--seq-len", "9", "--groups-per-step", "1"]
    assert "an address, not a folder" in said(capsys, "serve", "tcp://127.0.0.1:7440", *of_step)
    assert list(tmp_path.iterdir()) == []


def test_a_plane_without_a_folder_has_no_run_to_inspect(capsys: pytest.CaptureFixture[str]) -> None:
    with ps.open("memory:", ranks=1, seq_len=8, groups_per_step=1, listen=["tcp://127.0.0.1:*"]) as plane:
        assert plane._server is not None
        assert "its plane has no folder" in said(capsys, "inspect", plane._server.urls[1])


def test_a_run_of_a_plane_on_another_host_is_not_looked_for_here(
    laid_out: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(which_run, "gethostname", lambda: "elsewhere")
    folder, url = laid_out
    assert f"its run is in {folder / 'plane'} on host" in said(capsys, "tokens", url)


# ------------------------------------------------------------------ words of serve and top


def test_serve_blames_the_file_or_the_word_that_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plane.toml"
    path.write_text("foo = 1\n")
    assert said(capsys, "serve", f"--config={path}").startswith(f"{path}: foo: unknown key")
    path.write_text('folder = "x"\n[packing]\nranks = 1\nseq_len = 8\n[target]\ngroups = 1\n')
    words = said(capsys, "serve", f"--config={path}", "--set=packing.seq_lne=3")
    assert words.startswith("the command line: packing.seq_lne: unknown key; did you mean")
    words = said(capsys, "serve", "memory:", *SMALL, "--samples-per-step=4")
    assert words == "--groups-per-step and --samples-per-step: give exactly one; it decides when a step is complete"


def test_an_address_is_blamed_for_what_is_wrong_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = f"ipc://{tmp_path}/none/x.sock"
    words = said(capsys, "serve", "memory:", *SMALL, f"--listen={nowhere}")
    assert words == f"address '{nowhere}': No such file or directory; give an address that this host has"
    assert "--keys DIR" in said(capsys, "serve", "memory:", *SMALL, "--listen=tcp://0.0.0.0:*")
    assert "must begin with one of tcp://" in said(capsys, "top", "http://x", "--once")


def test_ctrl_c_ends_a_viewer_and_top_in_order(tmp_path: Path) -> None:
    make_export(tmp_path / "run", steps=1)
    with ps.open(tmp_path / "run" / "plane", ranks=1, seq_len=8, groups_per_step=1):
        pass
    for words in (["view", str(tmp_path / "run"), "--no-open"], ["top", str(tmp_path / "run")]):
        process = subprocess.Popen(
            [sys.executable, "-c", INTERRUPTIBLE, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline(), words  # it is at work
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == 0, words


def test_a_closed_output_is_no_traceback(tmp_path: Path) -> None:
    with ps.open(tmp_path / "run", ranks=1, seq_len=8, groups_per_step=1):
        pass
    for closed in (">&-", "2>&-"):
        words = f"{sys.executable} -m penstock inspect {tmp_path / 'run'} {closed}"
        done = subprocess.run(["bash", "-c", words], capture_output=True, text=True, timeout=300, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_an_interrupt_while_a_command_is_imported_ends_it_quietly() -> None:
    interrupt = """
import sys, penstock.cli as cli
class Stop:
    def find_spec(self, name, path, target=None):
        if name == "penstock.commands.pack":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Stop())
sys.exit(cli.main(["pack", "--help"]))
"""
    done = subprocess.run([sys.executable, "-c", interrupt], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (130, "")


def test_a_demo_is_not_mixed_into_the_folder_of_a_plane(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    with ps.open(folder, ranks=1, seq_len=8, groups_per_step=1):
        before = sorted(path.name for path in folder.iterdir())
        assert main(["demo", "--fast", "--folder", str(folder)]) == 1
        assert sorted(path.name for path in folder.iterdir()) == before
    assert "the folder of a plane" in capsys.readouterr().err
