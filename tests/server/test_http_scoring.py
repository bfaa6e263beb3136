"""A judge in any language: it leases samples over HTTP, and attaches their rewards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.server.plane_process import PlaneProcess
from tests.server.test_http import DOOR, Client, json_group
from tests.support.plane_processes import SMALL

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with PlaneProcess(["memory:", *SMALL, *DOOR, "--needs=rewards", "--set=needs_deadline_s=3600"]) as process:
        yield Client(process)


def without_rewards(name: str) -> dict[str, Any]:
    group = json_group(name)
    for rollout in group["rollouts"]:
        del rollout["reward"]
    return group


def ask(client: Client, path: str, **body: Any) -> tuple[int, Any]:
    return client.ask("POST", path, json.dumps(body).encode())


def test_a_group_put_without_rewards_is_leased_scored_and_held(client: Client) -> None:
    assert client.put(without_rewards("a"))[0] == 201
    code, leased = ask(client, "/v1/lacking", column="rewards", lease_s=600)
    assert code == 200
    first = leased["samples"][0]
    assert (first["id"], first["group"], first["prompt"], first["token_ids"]) == ("a/0", "a", "17", [5, 6, 0, 1])
    assert first["loss_mask"] == [False, False, True, True]
    assert ask(client, "/v1/lacking", column="rewards", timeout=0) == (200, {"samples": [], "leases": {}})
    values = {"a": {sample["id"]: 0.5 for sample in leased["samples"]}}
    assert ask(client, "/v1/attach", column="rewards", values=values) == (200, {"new": 2, "known": 0, "late": 0})
    assert ask(client, "/v1/attach", column="rewards", values=values) == (200, {"new": 0, "known": 2, "late": 0})
    code, problem = ask(client, "/v1/attach", column="rewards", values={"a": {"a/0": 1.0}})
    assert (code, problem["error"]) == (409, "Conflict")
    assert client.ask("GET", "/v1/ledger")[1]["held"] == 2


def test_a_column_that_no_group_waits_for_is_an_error_over_http_too(client: Client) -> None:
    code, problem = ask(client, "/v1/lacking", column="rewardz", timeout=0)
    assert (code, problem["error"]) == (400, "InvalidInput")
    assert "its groups wait for rewards" in problem["message"]


def test_a_lease_over_http_runs_out_and_the_group_goes_to_another_judge(client: Client) -> None:
    client.put(without_rewards("b"))
    assert ask(client, "/v1/lacking", column="rewards", lease_s=0.5)[1]["samples"]
    _, leased = ask(client, "/v1/lacking", column="rewards", timeout=120)
    assert [sample["id"] for sample in leased["samples"]] == ["b/0", "b/1"]
    errors = {"b": {"b/0": "timed out", "b/1": "timed out"}}
    assert ask(client, "/v1/attach", column="rewards", errors=errors)[1]["new"] == 2
    assert client.ask("GET", "/v1/ledger")[1]["dropped"] == {"scored as error": 2}


def test_a_lease_over_http_is_renewed_and_returned_like_that_of_a_task(client: Client) -> None:
    client.put(without_rewards("c"))
    client.put(without_rewards("d"))
    leases = ask(client, "/v1/lacking", column="rewards", lease_s=600)[1]["leases"]
    assert sorted(leases) == ["c", "d"]
    numbers = [leases["c"], leases["d"]]
    assert ask(client, "/v1/leases/renew", leases=numbers) == (200, {"cancelled": {}})
    values = {"c": {"c/0": 0.5, "c/1": 1.0}}
    assert ask(client, "/v1/attach", column="rewards", values=values)[1]["new"] == 2
    _, renewed = ask(client, "/v1/leases/renew", leases=numbers)
    assert renewed == {"cancelled": {str(leases["c"]): "completed: its values were attached"}}
    assert ask(client, "/v1/leases/return", leases=[leases["d"]])[0] == 200
    _, again = ask(client, "/v1/lacking", column="rewards", lease_s=600, timeout=120)  # 600 s before it would run out
    assert list(again["leases"]) == ["d"]
    values = {"d": {"d/0": 0.5, "d/1": 1.0}}
    assert ask(client, "/v1/attach", column="rewards", values=values)[1]["new"] == 2


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("/v1/lacking", b"{}", "missing required field `column`"),
        ("/v1/lacking", b'{"column": "rewards", "groups": 1000}', "1000 groups; lease 1 to 256 at once"),
        ("/v1/lacking", b'{"column": "rewards", "timeout": 1e9}', "<= 300"),
        ("/v1/attach", b'{"column": "rewards", "values": {"a": {"a/0": "x"}}}', "Expected `float |"),
        ("/v1/attach", b'{"column": "rewards", "values": {"none": {"a/0": 1}}}', "it was not accepted"),
        ("/v1/attach", b"[[[", "body"),
    ],
)
def test_requests_that_cannot_be_served_are_problems_with_a_reason(
    client: Client, path: str, body: bytes, text: str
) -> None:
    code, problem = client.ask("POST", path, body)
    assert 400 <= code < 500
    assert text in problem["message"]


@pytest.mark.parametrize("path", ["/v1/leases", "/v1/leases/renew", "/v1/leases/return", "/v1/lacking", "/v1/states"])
def test_what_no_message_can_hold_is_a_problem_and_the_server_goes_on(client: Client, path: str) -> None:
    deep, huge = b'{"a":' * 5000 + b"1" + b"}" * 5000, b"%d" % (1 << 70)
    # The second one has a field of every route.
    for body in (deep, b'{"count":%b,"groups":%b,"column":"rewards","leases":[%b]}' % (huge, huge, huge)):
        code, problem = client.ask("POST", path, body)
        assert (code, problem["error"]) == (400, "InvalidInput")
    assert client.ask("POST", "/v1/leases/renew", b'{"leases": []}') == (200, {"cancelled": {}})


def test_the_routes_need_the_token(client: Client) -> None:
    token, client.token = client.token, "wrong"
    try:
        assert ask(client, "/v1/attach", column="rewards")[0] == 401
    finally:
        client.token = token


def test_values_per_token_are_attached_as_lists() -> None:
    needs = ["--needs=teacher_logprobs", "--set=needs_deadline_s=3600"]
    with PlaneProcess(["memory:", *SMALL, *DOOR, *needs]) as process:
        client = Client(process)
        assert client.put(json_group("t"))[0] == 201
        _, leased = ask(client, "/v1/lacking", column="teacher_logprobs", lease_s=600)
        names = [sample["id"] for sample in leased["samples"]]
        values = {"t": {name: [0, -0.5, -1, -2.25] for name in names}}
        code, problem = ask(client, "/v1/attach", column="teacher_logprobs", values={"t": {names[0]: [-0.5]}})
        assert (code, problem["error"]) == (400, "InvalidInput")
        assert "group 't' sample 't/0': 1 values, and the sample has 4 tokens" in problem["message"]
        code, problem = ask(client, "/v1/attach", column="teacher_logprobs", values={"t": {names[0]: [0, "x", 0, 0]}})
        assert (code, problem["error"]) == (400, "InvalidInput")
        for expected in ({"new": 2, "known": 0, "late": 0}, {"new": 0, "known": 2, "late": 0}):
            assert ask(client, "/v1/attach", column="teacher_logprobs", values=values) == (200, expected)
        values["t"][names[0]][3] = -1
        code, problem = ask(client, "/v1/attach", column="teacher_logprobs", values=values)
        assert (code, problem["error"]) == (409, "Conflict")
        assert client.ask("GET", "/v1/ledger")[1]["held"] == 2
