"""`penstock view`: a server or a page in one file, its scripts, and the words of a tokenizer."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.errors import CorruptFile
from penstock.view import Export, web
from penstock.view.library import Library
from penstock.view.static_page import make_page
from penstock.view.vocabulary import open_vocabulary, piece_text
from penstock.view.web import SCRIPTS, static_files
from tests.support.exports import make_export
from tests.view.caller import Caller


def test_the_scripts_make_no_markup_from_text() -> None:
    for name, content in static_files().items():
        text = content.decode()
        for banned in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "http://",
            "https://",
        ):
            assert banned not in text, (name, banned)


def test_a_self_contained_page_has_its_data_inside_and_nothing_that_ends_it(tmp_path: Path) -> None:
    make_export(tmp_path / "demo", steps=1, groups=1, size=2)
    folder = tmp_path / "demo"
    (folder / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": {f"</script><script>alert({i})</script>": i for i in range(400)}}})
    )
    library = Library(exports={"demo": Export(folder)}, vocabulary=open_vocabulary(folder))
    page = make_page(library, sample=1).decode()
    assert page.count("<script") == page.count("</script>") == 2
    data = re.search(r'<script type="application/json" id="embedded">(.*?)</script>', page, re.DOTALL)
    assert data is not None and len(json.loads(data[1])["answers"]) == 4
    assert "src=" not in page.split("<style>")[0] and "href=" not in page.split("<style>")[0]


def test_view_command_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_export(tmp_path / "demo", steps=1, groups=1, size=1)
    out = tmp_path / "out" / "page.html"
    assert main(["view", str(tmp_path / "demo"), "--html", str(out)]) == 1
    assert "make it first" in capsys.readouterr().err and not out.parent.exists()
    out.parent.mkdir()
    assert main(["view", str(tmp_path / "demo"), "--html", str(out)]) == 0
    assert out.stat().st_size > 10_000 and capsys.readouterr().out.startswith(str(out))
    assert main(["view", str(tmp_path / "demo"), "--html", str(out), "--sample", "7"]) == 1


@pytest.mark.parametrize(
    ("piece", "text"),
    [
        ("Ġhello", " hello"),
        ("▁the", " the"),
        ("âĤ¬", "€"),
        ("âĤ", "\\xe2\\x82"),
        ("<0x0A>", "\n"),
        ("<0xFF>", "\\xff"),
        ("<|im_end|>", "<|im_end|>"),
        ("Ċ", "\n"),
        ("你", "你"),
    ],
)
def test_pieces_of_every_kind_of_vocabulary_become_text(piece: str, text: str) -> None:
    assert piece_text(piece) == text


def test_a_tokenizer_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CorruptFile, match=r"not a tokenizer\.json"):
        open_vocabulary(tmp_path)


def test_unigram_vocabularies_and_added_tokens_are_read(tmp_path: Path) -> None:
    data = {
        "model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["▁a", -1.5]]},
        "added_tokens": [{"id": 2, "content": "Ġ<x>"}],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    vocabulary = open_vocabulary(tmp_path)
    assert [vocabulary.text(i) for i in range(4)] == ["<unk>", " a", "Ġ<x>", None]


@pytest.mark.process
def test_view_command_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    """The whole command in a process of its own: it prints the URL, answers, and ends on Ctrl-C."""
    make_export(tmp_path / "demo", steps=1, groups=1, size=1)
    command = [sys.executable, "-m", "penstock.cli", "view", str(tmp_path / "demo"), "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        url = process.stdout.readline().strip()
        match = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/\?token=([\w-]{43})", url)
        assert match is not None
        caller = Caller(int(match[1]), match[2], "")
        assert process.stdout.readline().startswith("Serving demo to this machine only")
        assert f"ssh -L {match[1]}:127.0.0.1:{match[1]} " in process.stdout.readline()
        assert caller("/api/overview")[0] == 200 and caller("/api/overview", cookie=None)[0] == 403
        process.send_signal(signal.SIGINT)
        assert process.wait(120) in (0, 130)
        assert match[2] not in process.stderr.read()


@pytest.mark.process
def test_reading_and_showing_need_no_torch() -> None:
    code = "import sys, penstock.view, penstock.view.web, penstock.view.diff; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_page_asks_for_one_script_in_which_all_are() -> None:
    files, folder = static_files(), Path(web.__file__).parent / "static"
    assert re.findall(r'<script src="static/([\w.]+)" defer>', files["index.html"].decode()) == ["app.js"]
    assert set(SCRIPTS) == {path.stem for path in folder.glob("*.js")}
    assert all(path.read_bytes() in files["app.js"] for path in folder.glob("*.js"))
