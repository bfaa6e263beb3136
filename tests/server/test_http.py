"""The HTTP API of a real plane in a process of its own: what is put, what is refused, who may."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import penstock as ps
from penstock import errors
from penstock.frames import encode
from penstock.server import http_api as http_door
from penstock.server.http_api import STATUS, find_token, status_of
from penstock.server.openapi import FRAME, describe
from penstock.server.plane_process import PlaneProcess
from tests.support.groups import named_group
from tests.support.plane_processes import SMALL

pytestmark = pytest.mark.process

DOOR = ("--listen=tcp://127.0.0.1:*", "--http=127.0.0.1:0")


@pytest.fixture(scope="module")
def plane() -> Iterator[PlaneProcess]:
    with PlaneProcess(["memory:", *SMALL, *DOOR, "--needs=logprobs", "--max-held-bytes=200000"]) as process:
        yield process


class Client:
    """Asks a plane's door, each time over a connection of its own."""

    def __init__(self, plane: PlaneProcess, token: str | None = None) -> None:
        self.place = urlsplit(plane.ready["http"])
        self.headers: dict[str, str] = {}
        self.token = plane.ready["http_token"] if token is None else token

    def ask(self, verb: str, path: str, body: bytes = b"", kind: str = "", **headers: str) -> tuple[int, Any]:
        given = {"Authorization": f"Bearer {self.token}", "Content-Type": kind or "application/json", **headers}
        line = http.client.HTTPConnection(self.place.hostname or "", self.place.port, timeout=60)
        with contextlib.closing(line):
            line.request(verb, path, body=body or None, headers=given)
            answer = line.getresponse()
            text = answer.read()
            self.headers = dict(answer.getheaders())
        return answer.status, json.loads(text) if text.startswith(b"{") else text.decode()

    def put(self, group: dict[str, Any], timeout: float | None = None) -> tuple[int, Any]:
        path = "/v1/groups" if timeout is None else f"/v1/groups?timeout={timeout}"
        return self.ask("POST", path, json.dumps(group).encode())


def json_group(name: str, rewards: tuple[float, ...] = (0.0, 1.0), tokens: int = 2) -> dict[str, Any]:
    def rollout(reward: float) -> dict[str, Any]:
        reply = {"token_ids": list(range(tokens)), "logprobs": [-0.5] * tokens}
        return {"turns": [{"token_ids": [5, 6]}, reply], "reward": reward}

    return {"prompt": "17", "id": name, "rollouts": [rollout(reward) for reward in rewards]}


def test_feedback_comes_in_pages_with_a_cursor_and_waits_for_the_next_event() -> None:
    with PlaneProcess(["memory:", *SMALL, *DOOR]) as process:
        client = Client(process)
        assert client.ask("GET", "/v1/feedback") == (200, {"events": [], "cursor": ""})
        with ps.open(process.url) as plane:
            for number in range(5):
                plane.discard("zero variance", 2, group=f"g{number}", prompt="17", rewards=[1.0, None], lengths=[7, 8])
            _, first = client.ask("GET", "/v1/feedback?limit=2")
            event = first["events"][1]
            assert [event[name] for name in ("outcome", "reason", "group")] == ["filtered", "zero variance", "g1"]
            assert (event["rewards"], event["lengths"], event["step"]) == ([1.0, None], [7, 8], None)
            _, rest = client.ask("GET", f"/v1/feedback?after={first['cursor']}")
            assert [event["group"] for event in rest["events"]] == ["g2", "g3", "g4"]
            path = f"/v1/feedback?after={rest['cursor']}"
            assert client.ask("GET", path) == (200, {"events": [], "cursor": rest["cursor"]})
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(client.ask, "GET", f"{path}&wait=5")
                plane.discard("errored", 1, group="late")
                assert [event["group"] for event in waiting.result(60)[1]["events"]] == ["late"]
        for query in ("after=x", "after=0123456789ab.1", "limit=0", "limit=257", "limit=nan", "wait=-1", "wait=6"):
            code, said = client.ask("GET", f"/v1/feedback?{query}")
            assert (code, said["error"]) == (400, "InvalidInput"), query
        assert Client(process, "wrong").ask("GET", "/v1/feedback")[0] == 401
        assert client.ask("POST", "/v1/feedback")[0] == 405


def test_a_producer_asks_what_became_of_groups(tmp_path: Path) -> None:
    with PlaneProcess([str(tmp_path / "run"), *SMALL, *DOOR]) as process:
        client = Client(process)
        client.put(json_group("17#a"))
        code, said = client.ask("POST", "/v1/states", b'{"groups": ["17#a", "17#b"]}')
        held, unknown = {"state": "held", "reason": ""}, {"state": "unknown", "reason": ""}
        assert (code, said) == (200, {"states": {"17#a": held, "17#b": unknown}})
        many = json.dumps({"groups": [f"g{number}" for number in range(1025)]}).encode()
        for body, reason in ((many, "at most 1,024"), (b'{"groups": [1]}', "groups"), (b"[]", "body"), (b"x", "body")):
            code, said = client.ask("POST", "/v1/states", body)
            assert code == 400 and reason in said["message"]
        assert client.ask("POST", "/v1/states", b" " * (5 << 20))[0] == 413
        assert Client(process, "wrong").ask("POST", "/v1/states", many)[0] == 401


def test_a_json_group_is_what_a_python_producer_would_have_put(tmp_path: Path) -> None:
    with PlaneProcess([str(tmp_path / "run"), *SMALL, *DOOR]) as process:
        code, said = Client(process).put(json_group("17#a"))
        assert (code, said) == (201, {"group": "17#a", "samples": 2, "new": True})
        with ps.open(process.url) as plane:
            with plane.group("17", id="17#a") as group:
                for reward in (0.0, 1.0):
                    turns = [ps.Turn([5, 6]), ps.Turn([0, 1], logprobs=[-0.5, -0.5])]
                    group.add(ps.Trajectory(turns=turns, reward=reward))
            assert plane.ledger.accepted == 2, "it is the very same group"
            assert Client(process).put(json_group("17#a"))[0] == 200
            with plane.source(rank=0, prefetch=0) as source:
                step = source.step(timeout=60)
                assert step.loss_tokens == 4
                source.commit(step)
                source.flush()
        client = Client(process)
        assert client.ask("GET", "/v1/ledger")[1]["committed"] == 2
        assert client.ask("GET", "/v1/status")[1]["next_step"] == 2


def test_a_frame_is_put_as_it_is_and_known_again(plane: PlaneProcess) -> None:
    client, frame = Client(plane), encode(named_group("f1", samples=2, tokens=8))
    assert client.ask("POST", "/v1/groups", frame, FRAME) == (201, {"group": "f1", "samples": 2, "new": True})
    assert client.ask("POST", "/v1/groups", frame, FRAME) == (200, {"group": "f1", "samples": 2, "new": False})
    other = encode(named_group("f1", samples=1, tokens=8))
    code, said = client.ask("POST", "/v1/groups", other, FRAME)
    assert (code, said["error"]) == (409, "Conflict") and "'f1'" in said["message"]
    evaluation = encode(named_group("f2", samples=2, tokens=8))
    assert client.ask("POST", "/v1/groups?evaluation=true", evaluation, FRAME)[0] == 201
    assert client.ask("GET", "/v1/ledger")[1]["evaluation"] == 2


def test_what_is_wrong_is_named_in_the_words_of_the_python_error(plane: PlaneProcess) -> None:
    client = Client(plane)
    group = json_group("bad")
    group["rollouts"][1]["turns"][1]["logprobs"] = [-0.5]
    place = "rollouts[1].turns[1]"
    said = f"{place}.logprobs: 1 values for 2 sampled of 2 tokens; record one per sampled token, or one per token"
    assert client.put(group) == (400, {"error": "InvalidInput", "message": said})
    del group["rollouts"][1]["turns"][1]["logprobs"]
    group["rollouts"][1]["turns"][1]["sampled"] = True
    code, refused = client.put(group)
    assert (code, refused["error"]) == (400, "InvalidInput") and "logprobs" in refused["message"]
    for text, words in (
        (b'{"prompt": "a', "not JSON"),
        (b'{"prompt": "a", "rollouts": [{"turns": [{"token_ids": [1, "x"]}]}]}', "token_ids[1]: str; must be int"),
        (b'{"prompt": "a", "rollouts": [{}], "grop": 1}', "unknown field 'grop'"),
        (b'{"prompt": "a", "rollouts": [{"turns": [], "info": ' + b"[" * 9999 + b"]" * 9999 + b"}]}", "too deep"),
    ):
        code, refused = client.ask("POST", "/v1/groups", text)
        assert code == 400 and words in refused["message"], refused
    code, refused = client.ask("POST", "/v1/groups", encode(named_group("f9", samples=2, tokens=8))[:-3], FRAME)
    assert (code, refused["error"]) == (400, "CorruptFrame")


def test_only_who_has_the_token_may(plane: PlaneProcess) -> None:
    for token in ("", "x" * 43, plane.ready["http_token"] + "x"):
        client = Client(plane, token)
        for verb, path in (("GET", "/v1/status"), ("GET", "/v1/ledger"), ("POST", "/v1/groups")):
            code, said = client.ask(verb, path, b"{}" if verb == "POST" else b"")
            assert code == 401 and "Authorization: Bearer" in said["message"]
    client = Client(plane)
    assert client.ask("GET", "/v1/groups")[0] == 405
    assert client.ask("GET", "/")[0] == 404
    assert client.ask("GET", "/openapi.json", Authorization="")[0] == 200


def test_every_answer_is_the_promised_json(plane: PlaneProcess) -> None:
    client = Client(plane)
    for verb, path, code in (
        ("GET", "/", 404),
        ("POST", "/v1/status", 405),
        ("DELETE", "/v1/groups", 405),
        ("GET", "/v1/groups/", 404),
        ("PUT", "/openapi.json", 405),
    ):
        status, said = client.ask(verb, path)
        assert status == code and isinstance(said, dict) and {"error", "message"} <= said.keys(), (verb, path, said)
        assert client.headers["content-type"] == "application/json" and path in said["message"]
    assert client.ask("DELETE", "/v1/groups")[1]["message"].endswith("use POST")
    with socket.create_connection((client.place.hostname or "", client.place.port or 0), timeout=60) as raw:
        raw.sendall(b"this is no HTTP\r\n\r\n")
        said = raw.makefile("rb").read()
    assert said.startswith(b"HTTP/1.1 400 ") and json.loads(said.partition(b"\r\n\r\n")[2])["error"] == "InvalidInput"


def test_a_body_may_be_gzip_and_cannot_be_a_bomb(plane: PlaneProcess) -> None:
    client = Client(plane)
    body = json.dumps(json_group("packed")).encode()
    assert client.ask("POST", "/v1/groups", gzip.compress(body), **{"Content-Encoding": "gzip"})[0] == 201
    frame = encode(named_group("packed-frame"))
    assert client.ask("POST", "/v1/groups", gzip.compress(frame), FRAME, **{"Content-Encoding": "GZIP"})[0] == 201
    bomb = gzip.compress(bytes(64 << 20))
    assert len(bomb) < 100_000
    code, said = client.ask("POST", "/v1/groups", bomb, **{"Content-Encoding": "gzip"})
    assert code == 413 and "body: 67108864 bytes; at most" in said["message"]
    liar = bomb[:-4] + (1000).to_bytes(4, "little")  # its end claims a small body
    for wrong, why in (
        (liar, "gzip of other than the 1000 bytes"),
        (gzip.compress(body)[:-9] + bytes(8), "gzip of other than the 0 bytes"),
        (gzip.compress(body) + gzip.compress(body), "one complete member"),
        (body, "not gzip|at most"),
    ):
        code, said = client.ask("POST", "/v1/groups", wrong, **{"Content-Encoding": "gzip"})
        assert code in (400, 413) and re.search(why, said["message"]), said
    code, said = client.ask("POST", "/v1/groups", body, **{"Content-Encoding": "br"})
    assert code == 415 and said["message"] == "content-encoding: 'br'; must be gzip, or left out"


def test_bodies_are_bounded_before_a_byte_of_them_is_read(plane: PlaneProcess) -> None:
    place = urlsplit(plane.ready["http"])
    head = f"POST /v1/groups HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {plane.ready['http_token']}\r\n"
    for more, status in (
        (f"Content-Type: application/json\r\nContent-Length: {1 << 40}\r\n", 413),
        (f"Content-Type: {FRAME}\r\nContent-Length: {1 << 40}\r\n", 413),
        ("Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n", 411),
        ("Content-Type: text/plain\r\nContent-Length: 10\r\n", 415),
    ):
        with socket.create_connection((place.hostname or "", place.port or 0), timeout=60) as line:
            line.sendall(f"{head}{more}\r\n".encode())
            assert line.recv(1 << 16).startswith(f"HTTP/1.1 {status} ".encode())


def test_a_plane_without_room_says_when_to_come_again(tmp_path: Path) -> None:
    words = [str(tmp_path / "run"), *SMALL, *DOOR, "--max-held-bytes=5000"]
    with PlaneProcess(words) as process:
        client = Client(process)
        codes = [client.put(json_group(f"g{i}", tokens=60), timeout=0)[0] for i in range(30)]
        assert codes[0] == 201 and codes[-1] == 429
        code, said = client.put(json_group("one more"), timeout=0.2)
        assert (code, said["error"]) == (429, "Overloaded") and said["retry_after_s"] > 0
        assert int(client.headers["retry-after"]) >= said["retry_after_s"]
        for timeout in ("-1", "nan", "x", "301"):
            code, said = client.ask("POST", f"/v1/groups?timeout={timeout}", b"{}")
            assert code == 400 and f"timeout: '{timeout}'; must be seconds" in said["message"]


def test_a_put_waits_in_the_same_line_as_those_of_python_producers(tmp_path: Path) -> None:
    words = [str(tmp_path / "run"), *SMALL, *DOOR, "--capacity=1", "--groups-per-step=1"]
    answers: list[int] = []
    with PlaneProcess(words) as process, ps.open(process.url) as plane, ThreadPoolExecutor(16) as pool:
        plane.put(named_group("first"))
        before = [pool.submit(plane.put, named_group(f"before{i}")) for i in range(8)]
        _until(lambda: plane.status()["producers_waiting"] == 8)
        thread = threading.Thread(
            target=lambda: answers.append(Client(process).put(json_group("http"), timeout=300)[0])
        )
        thread.start()
        _until(lambda: plane.status()["producers_waiting"] == 9)
        after = [pool.submit(plane.put, named_group(f"after{i}")) for i in range(7)]
        _until(lambda: plane.status()["producers_waiting"] == 16)
        with plane.source(0, prefetch=0) as source:
            for _ in range(9):
                source.commit(source.step(timeout=60))
            source.flush()
            thread.join(60)  # its group comes behind nine, before the other seven
            assert answers == [201]
            assert [future.result(60) for future in before] == [True] * 8
            for _ in range(8):
                source.commit(source.step(timeout=60))
            source.flush()
        assert [future.result(60) for future in after] == [True] * 7


def test_who_hangs_up_leaves_the_line(tmp_path: Path) -> None:
    words = [str(tmp_path / "run"), *SMALL, *DOOR, "--capacity=1", "--groups-per-step=1"]
    with PlaneProcess(words) as process, ps.open(process.url) as plane:
        plane.put(named_group("first"))
        place, body = urlsplit(process.ready["http"]), json.dumps(json_group("g")).encode()
        head = (
            f"POST /v1/groups HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {process.ready['http_token']}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        with socket.create_connection((place.hostname or "", place.port or 0), timeout=60) as line:
            line.sendall(head.encode() + body)
            _until(lambda: plane.status()["producers_waiting"] == 1)
        _until(lambda: plane.status()["producers_waiting"] == 0)


def _until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end
        threading.Event().wait(0.01)


def test_what_was_answered_survives_a_kill_and_the_token_stays(tmp_path: Path) -> None:
    words = [str(tmp_path / "run"), *SMALL, *DOOR]
    first = PlaneProcess(words)
    assert [Client(first).put(json_group(f"g{i}"))[0] for i in range(5)] == [201] * 5
    os.kill(first.pid, signal.SIGKILL)
    first.kill()
    assert (tmp_path / "run" / "http-token").stat().st_mode & 0o777 == 0o600
    with PlaneProcess(words) as second:
        assert second.ready["http_token"] == first.ready["http_token"]
        assert [Client(second).put(json_group(f"g{i}"))[0] for i in range(5)] == [200] * 5


def test_many_producers_at_once_are_all_answered(plane: PlaneProcess) -> None:
    codes: list[int] = []

    def work(number: int) -> None:
        client = Client(plane)
        codes.extend(client.put(json_group(f"m{number}-{i}"))[0] for i in range(5))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(codes) == 80 and set(codes) <= {201, 429}


def test_the_plane_ends_while_clients_are_connected(tmp_path: Path) -> None:
    process = PlaneProcess([str(tmp_path / "run"), *SMALL, *DOOR])
    place = urlsplit(process.ready["http"])
    with socket.create_connection((place.hostname or "", place.port or 0), timeout=60) as idle:
        idle.sendall(b"POST /v1/groups HTTP/1.1\r\n")
        assert Client(process).put(json_group("a"))[0] == 201
        assert process.stop(30) == 0


def test_the_description_names_every_status_and_the_fields_of_a_group(plane: PlaneProcess) -> None:
    code, said = Client(plane).ask("GET", "/openapi.json")
    assert code == 200 and said["openapi"].startswith("3.1")
    answers = said["paths"]["/v1/groups"]["post"]["responses"]
    assert {int(status) for status in answers} >= {200, 201, 401, 411, 413, 415, *STATUS.values()}
    parts = said["components"]["schemas"]
    assert parts["JsonGroup"]["required"] == ["prompt", "rollouts"]
    assert set(parts["JsonTurn"]["properties"]) == {"token_ids", "logprobs", "sampled", "mask", "role", "columns"}


def test_a_generated_client_may_send_columns_and_leave_out_what_has_a_default() -> None:
    """What openapi-typescript makes of the description: an object without a word about its fields has none, and a field
    with a default must be given."""
    schemas = describe(STATUS)["components"]["schemas"]
    assert schemas["JsonTurn"]["properties"]["columns"]["additionalProperties"] is True
    assert schemas["JsonTurn"]["required"] == ["token_ids"]
    assert '"default":' not in json.dumps(schemas)
    assert "(default grpo)" in schemas["JsonGroup"]["properties"]["advantage"]["description"]


def test_every_error_has_a_status_that_says_whose_fault_it_is() -> None:
    kinds = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.PenstockError)
    ]
    found = {kind.__name__: status_of(kind("said")) for kind in kinds}
    assert all(
        400 <= status < 500
        for name, status in found.items()
        if issubclass(getattr(errors, name), ValueError) and not issubclass(getattr(errors, name), errors.AssetError)
    ), found
    assert (found["DiskFull"], found["Overloaded"], found["PlaneLost"], found["Evicted"]) == (507, 429, 503, 403)
    assert (found["Away"], found["StorageError"]) == (503, 500)


def test_other_hosts_only_with_a_token_that_was_given(tmp_path: Path) -> None:
    for address in ("0.0.0.0:0", "10.0.0.1:7441", "[::]:7441"):
        with pytest.raises(errors.ConfigError, match="http_token"):
            find_token(address, None, "memory:")
    file = tmp_path / "token"
    file.write_text("x" * 40)
    file.chmod(0o644)
    with pytest.raises(errors.ConfigError, match="others may read it"):
        find_token("0.0.0.0:7441", str(file), "memory:")
    file.chmod(0o600)
    assert find_token("0.0.0.0:7441", str(file), "memory:") == ("x" * 40, False)
    file.write_text("short")
    with pytest.raises(errors.ConfigError, match="5 characters"):
        find_token("127.0.0.1:7441", str(file), "memory:")
    for address in ("7441", "host:80", "127.0.0.1:99999"):
        with pytest.raises(errors.ConfigError, match="must be ADDRESS:PORT"):
            find_token(address, None, "memory:")


def test_a_port_that_is_taken_refuses_the_start_and_nothing_is_left(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        command = [sys.executable, "-m", "penstock.cli", "serve", str(tmp_path / "run"), *SMALL, DOOR[0]]
        done = subprocess.run([*command, f"--http=127.0.0.1:{port}"], capture_output=True, text=True, check=False)
        assert done.returncode == 1 and "use another port, or 0 for a free one" in done.stderr


def test_bytes_in_hand_are_counted_until_they_are_answered() -> None:
    in_hand = http_door.BytesInHand(100)
    with in_hand.taking(60) as fits, in_hand.taking(60) as more:
        assert (fits, more, in_hand.num_bytes) == (True, False, 60)
    assert in_hand.num_bytes == 0


@pytest.mark.parametrize("path", ["/v1/groups", "/v1/states", "/v1/leases", "/v1/lacking", "/v1/attach"])
def test_every_body_counts_against_the_bytes_in_hand(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(http_door, "MAX_BYTES_IN_HAND", 100)
    body, statuses = b"{}" + bytes(200), list[int]()
    headers = {"authorization": "Bearer t", "content-type": "application/json", "content-length": str(len(body))}
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    with ps.open("memory:", ranks=1, seq_len=64, groups_per_step=1) as plane, ThreadPoolExecutor(1) as pool:
        asyncio.run(http_door.make_app(plane, pool, token="t")(scope, receive, send))
    assert statuses == [429]


# ------------------------------------------------------------------ tasks


def test_a_worker_without_python_leases_renews_returns_and_completes_tasks(plane: PlaneProcess) -> None:
    client = Client(plane)

    def post(path: str, **body: Any) -> Any:
        status, found = client.ask("POST", path, json.dumps(body).encode())
        assert status == 200, found
        return found

    with ps.open(plane.url) as line:
        next(
            iter(line.tasks([{"name": "a", "q": 1}, "b"], name="http", order=ps.Sequential(shuffle=False)))
        ).give_back()
        first = post("/v1/leases", list="http", count=2, worker="go", lease_s=60)
        assert [task["prompt"] for task in first["tasks"]] == ["a", "b"]
        assert first["tasks"][0]["payload"] == {"name": "a", "q": 1}
        numbers = [task["lease"] for task in first["tasks"]]
        assert post("/v1/leases/renew", leases=[*numbers, 10**9])["cancelled"].keys() == {str(10**9)}
        assert post("/v1/leases/return", leases=numbers[1:]) == {}
        assert client.put(json_group(first["tasks"][0]["id"]))[0] == 201
        assert client.put(json_group(first["tasks"][0]["id"], rewards=(0.5, 0.7)))[0] == 200  # late, and no error
        again = post("/v1/leases", list="http", worker="go")["tasks"]
        assert [task["prompt"] for task in again] == ["b"]
        post("/v1/leases/return", leases=[again[0]["lease"]], reason="no answer")
        end = post("/v1/leases", list="http", worker="go")
        assert (end["tasks"], end["ended"]) == ([], True)
        assert line.demand()["http"]["dropped"] == {"no answer": 1}
    for path, body in (
        ("/v1/leases", {"list": "none"}),
        ("/v1/leases", {"count": 0, "list": "http"}),
        ("/v1/leases", {"count": "x"}),
        ("/v1/leases", {"list": "http", "lease": 600}),
        ("/v1/leases/return", {"leases": [], "why": "no answer"}),
        ("/v1/leases/renew", {"leases": list(range(2000))}),
        ("/v1/leases/return", {}),
    ):
        status, found = client.ask("POST", path, json.dumps(body).encode())
        assert status in (400, 404), found
