"""The OpenAPI 3.1 description of the HTTP API, generated from the records that the API parses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.convert import JsonGroup
from penstock.errors import PenstockError
from penstock.protocol import FeedbackEvent
from penstock.server.http_leases import (
    AskedAttach,
    AskedLease,
    AttachedCounts,
    CancelledLeases,
    HttpTasks,
    Leased,
    NamedLeases,
    WantedTasks,
)
from penstock.version import __version__

FRAME = "application/x-penstock-frame"
"""The media type of a frame."""


class Put(msgspec.Struct, kw_only=True):
    """The answer to a group that is durable."""

    group: str
    samples: int
    new: bool
    """False if the plane already had this group."""
    over_length: dict[str, int] | None = None
    """truncated_samples, truncated_tokens, dropped_samples, dropped_tokens. Absent if no sample is too long."""


class AskedGroups(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A question about groups."""

    groups: list[str]
    """Their ids, at most 1,024."""


class State(msgspec.Struct, kw_only=True):
    """The state of a group."""

    state: str
    """waiting, held, scheduled, delivered, committed, dropped, quarantined or evaluation; unknown if it was not
    accepted."""
    reason: str
    """Why it was dropped or quarantined."""


class States(msgspec.Struct, kw_only=True):
    """The answer to a question about groups."""

    states: dict[str, State]


class Event(msgspec.Struct, kw_only=True):
    """The outcome of a group."""

    cursor: str
    """Resumes the stream after this event."""
    outcome: str
    """trained, dropped, quarantined, filtered, evaluation or rewound."""
    reason: str
    group: str
    prompt: str
    env: str
    tenant: str
    samples: int
    rewards: list[float | None]
    """One per sample, of the first 256; null: not scored. Empty if no sample has a reward."""
    lengths: list[int]
    """Tokens of each sample, of the first 256."""
    step: int | None
    """The step that was trained, or the first one to be trained again."""
    staleness: int | None


class Events(msgspec.Struct, kw_only=True):
    """A page of the feedback stream, oldest event first."""

    events: list[Event]
    cursor: str
    """Pass it as `after` to get the next page."""


def shown(event: FeedbackEvent) -> Event:
    """Return an event as the API shows it."""
    return msgspec.convert(msgspec.structs.asdict(event), Event)


class Problem(msgspec.Struct, kw_only=True):
    """An error."""

    error: str
    """The class of the error in penstock.errors."""
    message: str
    retry_after_s: float | None = None


def _parameter(name: str, description: str, schema: dict[str, Any], place: str = "query") -> dict[str, Any]:
    return {"name": name, "in": place, "description": description, "schema": schema}


_EVALUATION = _parameter(
    "evaluation",
    "for a frame: recorded and shown, never trained; a JSON group has a field for it",
    {"type": "boolean", "default": False},
)
_TIMEOUT = _parameter(
    "timeout", "seconds to wait while there is no room, at most 300; then 429", {"type": "number", "default": 20}
)
_AFTER = _parameter("after", "the cursor of the last event you have; left out: from the start", {"type": "string"})
_LIMIT = _parameter("limit", "events of the page at most, 1 to 256", {"type": "integer", "default": 256})
_WAIT = _parameter(
    "wait",
    "seconds to wait for an event if there is none yet, at most 5; then the page is empty",
    {"type": "number", "default": 0},
)
_ENCODING = _parameter(
    "content-encoding", "gzip, if the body is compressed", {"type": "string", "enum": ["gzip"]}, "header"
)
_OWN = {
    401: "no token, or a wrong one",
    408: "body too slow",
    411: "no content-length",
    413: "the body is too large, or would be when decompressed",
}


_BODIES: list[Any] = [
    *(JsonGroup, Put, AskedGroups, States, Events, Problem),
    *(WantedTasks, HttpTasks, NamedLeases, CancelledLeases),
    *(AskedLease, Leased, AskedAttach, AttachedCounts),
]
"""The records of requests and answers."""


def describe(statuses: Mapping[type[PenstockError], int]) -> dict[str, Any]:
    """Return the description of all routes. `statuses` maps errors to HTTP statuses."""
    found, parts = msgspec.json.schema_components(_BODIES, ref_template="#/components/schemas/{name}")
    schemas = dict(zip(_BODIES, found, strict=True))
    problem = schemas[Problem]
    names: dict[int, list[str]] = defaultdict(list)
    for kind, status in statuses.items():
        names[status].append(kind.__name__)
    problems = {
        str(status): _answer(description, problem)
        for status, description in sorted(({s: ", ".join(found) for s, found in names.items()} | _OWN).items())
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": __version__, "description": "Put groups of rollouts into a plane."},
        "paths": {
            "/v1/groups": _put_group(schemas, problems),
            "/v1/feedback": {
                "get": {
                    "operationId": "get_feedback",
                    "summary": "What became of each group, in order",
                    "parameters": [_AFTER, _LIMIT, _WAIT],
                    "responses": {"200": _answer("the next events", schemas[Events]), **problems},
                }
            },
            **_questions(schemas, problems),
            "/v1/status": _look("get_status", "The plane's status", problem),
            "/v1/ledger": _look("get_ledger", "The state of every accepted sample", problem),
        },
        "components": {
            "schemas": _opened(parts),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
    }


def _put_group(schemas: Mapping[Any, Any], problems: dict[str, Any]) -> dict[str, Any]:
    frame = {"schema": {"type": "string", "format": "binary"}}
    group = {"schema": schemas[JsonGroup]}
    return {
        "post": {
            "operationId": "put_group",
            "summary": "Put a group; it is durable when this is answered",
            "parameters": [_EVALUATION, _TIMEOUT, _ENCODING],
            "requestBody": {"required": True, "content": {"application/json": group, FRAME: frame}},
            "responses": {
                "201": _answer("the group is new, and durable", schemas[Put]),
                "200": _answer("the plane already had this group", schemas[Put]),
                "415": _answer("another content-type", schemas[Problem]),
                **problems,
            },
        }
    }


def _questions(schemas: Mapping[Any, Any], problems: dict[str, Any]) -> dict[str, Any]:
    """Describe the routes that take a small JSON body."""

    def ask(name: str, summary: str, body: Any, means: str, answer: Any) -> dict[str, Any]:
        content = {"application/json": {"schema": schemas[body]}}
        answers = {"200": _answer(means, schemas.get(answer, {"type": "object"})), **problems}
        asked = {"required": True, "content": content}
        return {"post": {"operationId": name, "summary": summary, "requestBody": asked, "responses": answers}}

    some = "samples; none if no group lacked the column in time"
    attached = "Give samples a late value; durable"
    return {
        "/v1/states": ask("get_states", "What became of groups", AskedGroups, "the state of each, by id", States),
        "/v1/leases": ask("lease_tasks", "Lease tasks", WantedTasks, "tasks, or why there are none", HttpTasks),
        "/v1/leases/renew": ask("renew_leases", "Renew leases", NamedLeases, "what was cancelled", CancelledLeases),
        "/v1/leases/return": ask("return_leases", "Return leases", NamedLeases, "done", None),
        "/v1/lacking": ask("lease_samples", "Lease samples that lack a column", AskedLease, some, Leased),
        "/v1/attach": ask("attach_values", attached, AskedAttach, "counts, in samples", AttachedCounts),
    }


def _opened(schema: Any) -> Any:
    """Adapt schemas for generators of clients.

    They take an object without declared fields for an empty one, so it gets `additionalProperties`. They require a
    field that has a default, so a default is only mentioned in the description.
    """
    if isinstance(schema, list):
        return [_opened(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: _opened(part) for name, part in schema.items() if name != "default"}
    if schema.get("default"):
        found["description"] = f"{found.get('description', '')} (default {schema['default']})".strip()
    is_open = found.get("type") == "object" and not {"properties", "additionalProperties"} & found.keys()
    return {**found, "additionalProperties": True} if is_open else found


def _look(name: str, summary: str, problem: Any) -> dict[str, Any]:
    answers = {
        "200": _answer(summary, {"type": "object", "additionalProperties": True}),
        "401": _answer(_OWN[401], problem),
    }
    return {"get": {"operationId": name, "summary": summary, "responses": answers}}


def _answer(description: str, schema: Any) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}
