"""What the viewer's server answers, and what it refuses with words; raw requests, no browser."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.view import Export
from penstock.view.library import Library
from penstock.view.record import Step
from penstock.view.web import serving
from tests.support.exports import make_export
from tests.view.caller import STEP, Caller


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
    (run,) = overview["exports"][0].pop("runs")
    assert overview["exports"] == [{"name": "demo", "folder": "demo"}] and run.pop("last") > 0
    assert run == {"run": "", "steps": [1, 2], "state": None, "events": 0}
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


def test_many_who_ask_for_a_step_have_it_read_once(tmp_path: Path) -> None:
    make_export(tmp_path, steps=2, ranks=1, groups=2, size=2)
    library = Library(exports={"demo": Export(tmp_path)})
    library.read_ahead()
    newest = Export(tmp_path).steps()[-1].number
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: library.index("demo", "", newest), range(8)))
    assert len({id(one) for one in found}) == 1


def test_a_step_that_takes_long_to_read_keeps_nobody_from_another(tmp_path: Path) -> None:
    reached, released, asked = threading.Event(), threading.Event(), list[int]()

    class Slow(Export):
        def step(self, number: int, run: str | None = None) -> Step:
            asked.append(number)
            if asked.count(second.number) == 2 and number == second.number:  # first its stamp is looked at
                reached.set()
                assert released.wait(60)
            return super().step(number, run)

    make_export(tmp_path, steps=2, ranks=1, groups=1, size=2)
    first, second = Export(tmp_path).steps()
    library = Library(exports={"demo": Slow(tmp_path)})
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(library.index, "demo", "", second.number)
        assert reached.wait(60)
        assert library.index("demo", "", first.number).rows and not slow.done()
        released.set()
        assert slow.result(30).rows
