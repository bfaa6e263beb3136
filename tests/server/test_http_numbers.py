"""Extreme numbers in every field of every route: each is a problem with a reason or fits, and the plane restarts."""

from __future__ import annotations

import contextlib
import copy
import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

import penstock as ps
from penstock.server.http_api import HttpApi

TOKEN = "t" * 32
VALUES = [
    *("9007199254740993", "2147483648", "9223372036854775808", "18446744073709551616", "-1", "1e308", "-1e400", "NaN"),
    *("1.5", '"3"', "null", "true", "{}", "[]", "[1,[2]]", "[[[[1]]]]", "[1e308]", '"\\ud800"', "1" * 400),
]
TURN = {
    "token_ids": [7],
    "logprobs": [-0.5],
    "mask": [1],
    "role": "assistant",
    "columns": {
        "temperatures": 1.0,
        "weight_versions": [0],
        "teacher_logprobs": [-1.0],
        "sampling_mask": [[7]],
        "own": 1,
    },
}
ROLLOUT = {
    "turns": [{"token_ids": [5, 6]}, TURN],
    "parents": [-1, 0],
    "keeps": [None, None],
    "reward": 1.0,
    "policy_version": 0,
    "seconds": 1.0,
    "metrics": {"m": 1.0},
    "info": {"n": 1},
    "truncated": False,
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/groups": {"prompt": "p", "policy_version": 0, "evaluation": False, "rollouts": [ROLLOUT, {**ROLLOUT}]},
    "/v1/lacking": {"column": "rewards", "groups": 1, "lease_s": 60.0, "timeout": 0.0},
    "/v1/attach": {"column": "rewards", "values": {"late": {"late/0": 1.0}}, "errors": {}},
    "/v1/states": {"groups": ["late"]},
    "/v1/leases": {"list": "prompts", "count": 1, "worker": "w", "lease_s": 60.0},
    "/v1/leases/renew": {"leases": [1], "reason": ""},
    "/v1/leases/return": {"leases": [1], "reason": ""},
}


def open_plane(folder: Path) -> ps.Plane:
    return ps.open(
        folder,
        ranks=1,
        seq_len=64,
        groups_per_step=1,
        untrained_groups="accept",
        needs=["rewards"],
        needs_deadline_s=3600.0,
        columns=[ps.Column("own", dtype="int64", fill=0)],
    )


def changed(body: Any) -> Iterator[str]:
    """The body with each of its values, at any depth, replaced by each extreme value."""

    def places(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        if path:
            yield path
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, one in inner:
            yield from places(one, (*path, key))

    for *path, last in places(body, ()):
        other = copy.deepcopy(body)
        at = other
        for key in path:
            at = at[key]
        at[last] = "@"
        yield from (json.dumps(other).replace('"@"', value) for value in VALUES)


@pytest.mark.deep
def test_extreme_numbers_anywhere_are_problems_and_the_plane_restarts(tmp_path: Path) -> None:
    with open_plane(tmp_path) as plane, contextlib.closing(HttpApi("127.0.0.1:0", plane, token=TOKEN)) as api:
        place = urlsplit(api.url)

        def ask(path: str, body: str | None = None) -> int:
            line = http.client.HTTPConnection(place.hostname or "", place.port, timeout=120)
            with contextlib.closing(line):
                headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
                line.request("GET" if body is None else "POST", path, body and body.encode(), headers)
                return line.getresponse().status

        assert ask("/v1/groups", json.dumps({**BODIES["/v1/groups"], "id": "first"})) == 201
        late = copy.deepcopy(BODIES["/v1/groups"] | {"id": "late"})
        for rollout in late["rollouts"]:
            del rollout["reward"]
        assert ask("/v1/groups", json.dumps(late)) == 201
        next(iter(plane.tasks(["a", "b"], name="prompts"))).give_back()
        for path, body in BODIES.items():
            for text in changed(body):
                assert ask(path, text) in (200, 201, 400, 404, 409), (path, text)
        for value in VALUES:
            for query in ("groups?timeout", "feedback?after", "feedback?limit", "feedback?wait"):
                path, sent = f"/v1/{query}={quote(value)}", "{}" if query.startswith("groups") else None
                assert ask(path, sent) in (200, 400), path
        assert ask("/v1/status") == 200
        before = plane.ledger
        assert before.accepted > 2
    with open_plane(tmp_path) as plane, plane.source(0) as source:
        assert plane.ledger == before
        while (ledger := plane.ledger).held + ledger.scheduled + ledger.delivered:
            source.commit(source.step(timeout=120))
            source.flush()
        # A group that was accepted without log-probabilities cannot be in a step with others.
        assert all(one["reason"].startswith("logprobs:") for one in plane.status()["quarantine"])
        assert ledger.committed + ledger.quarantined == before.held and ledger.committed > 100
