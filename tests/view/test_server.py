"""The viewer's server: who is let in, what is answered, and what never is. No browser here: raw requests."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.assets import AssetStore
from penstock.cli import main
from penstock.errors import ConfigError, CorruptFile
from penstock.testing.exports import make_export
from penstock.testing.reference_images import draw_screenshot
from penstock.view import Export
from penstock.view.access import POLICY, Guard, cookie_name, new_token
from penstock.view.library import Library
from penstock.view.static_page import make_page
from penstock.view.vocabulary import open_vocabulary, piece_text
from penstock.view.web import SCRIPTS, listening, serving, static_files


class Caller:
    """Requests to one viewer, well-formed unless told otherwise."""

    def __init__(self, port: int, token: str, image: str) -> None:
        self.port, self.token, self.image = port, token, image

    def __call__(
        self, path: str, method: str = "GET", *, cookie: str | None = "", **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        own = f"{cookie_name(self.token)}={self.token}" if cookie == "" else cookie
        sent = {**({"Cookie": own} if own else {}), **{name.replace("_", "-"): v for name, v in headers.items()}}
        try:
            connection.putrequest(method, path, skip_host="Host" in sent)
            for name, value in sent.items():
                connection.putheader(name, value)
            connection.endheaders()
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()


@pytest.fixture(scope="module")
def viewer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caller]:
    folder = tmp_path_factory.mktemp("view") / "demo"
    make_export(folder, steps=2, groups=3, size=2)
    store = AssetStore(folder / "assets")
    image = store.put(draw_screenshot(seed=1, width=64, height=48)).hash
    library = Library(exports={"demo": Export(folder)}, vocabulary=open_vocabulary(folder), images=store)
    with serving(library) as (_, port, token):
        yield Caller(port, token, image)


STEP = "export=demo&run=&step=1"
ROUTES = [
    "/",
    "/static/app.js",
    "/static/style.css",
    "/api/overview",
    "/api/dropped?export=demo&run=",
    f"/api/whatif?{STEP}&rule=dppo",
    f"/api/search?{STEP}&query=times",
    f"/api/group?{STEP}&group=s1-g0",
    "/api/run?export=demo&run=",
    f"/api/step?{STEP}",
    f"/api/sample?{STEP}&sample=0",
    "/image/HASH",
    "/nothing",
]


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_needs_the_token(viewer: Caller, route: str) -> None:
    path = route.replace("HASH", viewer.image)
    status = 404 if route == "/nothing" else 200
    assert viewer(path)[0] == status
    name = cookie_name(viewer.token)
    for cookie in (None, "penstock_1=x", f"{name}=", f"{name}={new_token()}"):
        refused, headers, body = viewer(path, cookie=cookie)
        assert refused == 403 and b"needs the token" in body and headers["content-type"].startswith("text/plain")


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "PROPFIND"])
def test_nothing_but_get_and_head_exists(viewer: Caller, route: str, method: str) -> None:
    assert viewer(route.replace("HASH", viewer.image), method)[0] in (400, 405)


def test_head_answers_without_a_body(viewer: Caller) -> None:
    status, headers, body = viewer("/api/overview", "HEAD")
    assert status == 200 and body == b"" and int(headers["content-length"]) > 0


@pytest.mark.parametrize(
    "host",
    [
        "evil.com",
        "evil.com:PORT",
        "x/?",
        "127.0.0.1:PORT.evil.com",
        "",
        "LOCALHOST.:PORT",
        "127.0.0.1:",
        "127.0.0.2:PORT",
    ],
)
def test_another_host_is_refused_even_with_the_token(viewer: Caller, host: str) -> None:
    status, _, body = viewer("/api/overview", Host=host.replace("PORT", str(viewer.port)))
    assert status in (400, 421) and b"exports" not in body


def test_the_hosts_of_this_machine_are_taken(viewer: Caller) -> None:
    for host in ("127.0.0.1", "localhost", "[::1]", "LocalHost"):
        assert viewer("/api/overview", Host=f"{host}:{viewer.port}")[0] == 200


def test_a_tunnel_may_end_on_any_port_of_this_machine(viewer: Caller) -> None:
    for host in ("127.0.0.1:9999", "localhost:1", "127.0.0.1"):
        assert viewer("/api/overview", Host=host, Origin=f"http://{host}")[0] == 200
        assert viewer("/api/overview", Host=host, Origin="http://127.0.0.1:5")[0] == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.com"},
        {"Origin": "null"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
)
def test_requests_of_other_sites_are_refused(viewer: Caller, headers: dict[str, str]) -> None:
    assert viewer("/api/overview", **headers)[0] == 403


def test_the_token_in_the_address_becomes_a_cookie_and_goes(viewer: Caller) -> None:
    status, headers, _ = viewer(f"/?token={viewer.token}", cookie=None)
    assert status == 303 and headers["location"] == "/"
    assert headers["set-cookie"] == f"{cookie_name(viewer.token)}={viewer.token}; Path=/; HttpOnly; SameSite=Strict"
    for path in (
        f"/?token={viewer.token}x",
        "/?token=",
        f"/?token={viewer.token}&token=x",
        f"/api/overview?token={viewer.token}",
    ):
        status, headers, _ = viewer(path, cookie=None)
        assert status == 403 and "set-cookie" not in headers


@pytest.mark.parametrize("route", ["/", "/api/overview", "/nothing", "/image/HASH"])
def test_every_answer_carries_the_policy(viewer: Caller, route: str) -> None:
    for cookie in ("", None):
        _, headers, _ = viewer(route.replace("HASH", viewer.image), cookie=cookie)
        assert headers["content-security-policy"] == POLICY and headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer" and headers["cache-control"] == "no-store"
        assert "server" not in headers


@pytest.mark.parametrize(
    "path",
    [
        "/static/../server.py",
        "/static/..%2fserver.py",
        "/static/%2e%2e/server.py",
        "/static/app.js%00.css",
        "/static/",
        "/image/../../etc/passwd",
        "/image/..%2f..%2fetc%2fpasswd",
        f"/image/{'0' * 64}",
        f"/image/{'A' * 64}",
        "/api/step?export=../..&run=&step=1",
        "/api/step?export=demo&run=../x&step=1",
        "/api/step?export=demo&run=&step=99",
        "/api/step?export=demo&run=&step=-1",
        "/api/step?export=demo&run=&step=1e3",
        "/api/step?export=demo&run=&step=²",
        f"/api/sample?{STEP}&sample=9999",
        f"/api/sample?{STEP}&sample=",
        "/api/",
    ],
)
def test_what_is_not_there_is_not_found(viewer: Caller, path: str) -> None:
    status, headers, body = viewer(path.replace("²", "%C2%B2"))
    assert status in (400, 404) and len(body) < 500 and b"root:" not in body
    assert "html" not in headers.get("content-type", "")


ODD = [
    "",
    "-1",
    "+1",
    "1.0",
    "1e3",
    "0x1",
    "nan",
    "1_0",
    "+1+",
    "%201",
    "1%00",
    "%F0%9F%98%80",
    "%FF",
    "9" * 19,
    "9" * 4000,
]


@pytest.mark.parametrize("value", ODD)
@pytest.mark.parametrize("name", ["step", "sample"])
def test_a_number_that_is_none_is_refused_by_name(viewer: Caller, name: str, value: str) -> None:
    given = {"export": "demo", "run": "", "step": "1", "sample": "0", name: value}
    status, _, body = viewer("/api/sample?" + "&".join(f"{key}={text}" for key, text in given.items()))
    assert (
        status == 400 and body.startswith(f"{name}: ".encode()) and b"give a whole number" in body and len(body) < 200
    )


@pytest.mark.parametrize(
    ("query", "status", "words"),
    [
        ("", 400, "step: ''"),
        ("step=1&sample=0", 404, "export ''"),
        ("export=demo", 400, "step: ''"),
        ("export=demo&step=1", 400, "sample: ''"),
        ("export=demo&step=999999999999999999&sample=0", 404, "no finished step 999999999999999999"),
        ("export=demo&step=1&sample=999999999999999999", 404, "sample 999999999999999999: the step has 6"),
        ("export=x&step=1&sample=0", 404, "there are demo"),
        ("export=demo&run=x&step=1&sample=0", 404, "no run 'x'"),
        (f"export=demo&run={'x' * 3000}&step=1&sample=0", 404, "no run"),
        ("export=demo&run=%00&step=1&sample=0", 404, "no run"),
        ("export=demo&step=1&sample=0&step=2&sample=99", 404, "sample 99"),
        ("a;b=c&&==&%", 400, "step: ''"),
    ],
)
def test_a_question_that_cannot_be_answered_says_what_is_wrong(
    viewer: Caller, query: str, status: int, words: str
) -> None:
    found, headers, body = viewer(f"/api/sample?{query}")
    assert found == status and words in body.decode() and headers["content-type"].startswith("text/plain")
    assert len(body) < 500


def test_a_step_that_is_damaged_or_taken_back_is_an_answer_with_words(tmp_path: Path) -> None:
    make_export(tmp_path / "demo", steps=1, ranks=1, groups=1, size=1)
    step = tmp_path / "demo/token_exports/step_1"
    with serving(Library(exports={"demo": Export(tmp_path / "demo")})) as (_, port, token):
        caller = Caller(port, token, "")
        assert caller(f"/api/sample?{STEP}&sample=0")[0] == 200
        (step / "rank_0.jsonl").unlink()  # its rows are still known
        status, _, body = caller(f"/api/sample?{STEP}&sample=0")
        assert status == 500 and b"rank_0.jsonl" in body and len(body) < 500
        (step / "rank_0.done").write_bytes(b"x")
        status, _, body = caller(f"/api/run?{STEP}")
        assert status == 500 and b"rank_0.done: not a rank's marker" in body
        (step / "STABLE").unlink()  # as a rank does that writes it again
        status, _, body = caller(f"/api/sample?{STEP}&sample=0")
        assert status == 404 and b"no finished step 1" in body


def test_many_range_headers_and_a_body_change_nothing(viewer: Caller) -> None:
    ranges = "bytes=" + ",".join(f"{i}-{i}" for i in range(5000))
    plain = viewer("/static/app.js")
    assert viewer("/static/app.js", Range=ranges[:60_000])[0] in (200, 400, 431)
    assert viewer("/static/app.js", Range="bytes=0-1")[2] == plain[2]


def test_answers_are_what_was_exported(viewer: Caller) -> None:
    overview = json.loads(viewer("/api/overview")[2])
    assert overview["exports"] == [
        {"name": "demo", "folder": "demo", "runs": [{"run": "", "steps": [1, 2], "state": None}]}
    ]
    step = json.loads(viewer(f"/api/step?{STEP}")[2])
    assert [row["index"] for row in step["samples"]] == list(range(6)) and len(step["grid"]) == 2
    for row in step["samples"]:
        answer = json.loads(viewer(f"/api/sample?{STEP}&sample={row['index']}")[2])
        record, texts = answer["record"], answer["texts"]
        assert record["sample_id"] == row["sample_id"] and len(record["token_ids"]) == row["tokens"]
        said = "".join(texts[str(i)] for i in record["token_ids"])
        assert said.startswith("<|im_start|>system\nYou are a careful assistant.")
    curves = json.loads(viewer("/api/run?export=demo&run=")[2])["steps"]
    assert [point["step"] for point in curves] == [1, 2] and curves[1]["metrics"]["buffer_age_s"] == 15.0


def test_images_come_with_their_type_and_as_they_were(viewer: Caller) -> None:
    status, headers, body = viewer(f"/image/{viewer.image}")
    assert status == 200 and headers["content-type"] == "image/png" and body[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_server_listens_on_the_loopback_address_only() -> None:
    with listening(0) as (listener, port):
        assert listener.getsockname() == ("127.0.0.1", port)


def test_a_short_token_is_refused() -> None:
    async def app(*_: Any) -> None: ...

    with pytest.raises(ConfigError, match="at least 22"):
        Guard(app, token="")
    assert len(new_token()) >= 43 and new_token() != new_token()


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
    assert page.count("<script") == page.count("</script>") == 1 + len(SCRIPTS)
    data = re.search(r'<script type="application/json" id="embedded">(.*?)</script>', page, re.DOTALL)
    assert data is not None and len(json.loads(data[1])["answers"]) == 4
    assert "src=" not in page.split("<style>")[0] and "href=" not in page.split("<style>")[0]


def test_view_command_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_export(tmp_path / "demo", steps=1, groups=1, size=1)
    out = tmp_path / "out" / "page.html"
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
        assert process.wait(20) in (0, 130)
        assert match[2] not in process.stderr.read()


def test_reading_and_showing_need_no_torch() -> None:
    code = "import sys, penstock.view, penstock.view.web, penstock.view.diff; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_page_loads_every_script_in_the_order_that_files_are_written_in() -> None:
    found = re.findall(r'<script src="static/(\w+)\.js" defer>', static_files()["index.html"].decode())
    assert tuple(found) == SCRIPTS
