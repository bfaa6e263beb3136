"""The OpenAPI 3.1 description of the HTTP API, generated from the records that the API parses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.convert import JsonGroup
from penstock.errors import PenstockError
from penstock.server.http_scoring import AskedAttach, AskedLease, AttachedCounts, Leased
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
    """What became of a group."""

    state: str
    """waiting, held, scheduled, delivered, committed, dropped, quarantined or evaluation; unknown if it was not
    accepted."""
    reason: str
    """Why it was dropped or quarantined."""


class States(msgspec.Struct, kw_only=True):
    """The answer to a question about groups."""

    states: dict[str, State]


class Problem(msgspec.Struct, kw_only=True):
    """An error."""

    error: str
    """The class of the error in penstock.errors."""
    message: str
    retry_after_s: float | None = None


_EVALUATION = {
    "name": "evaluation",
    "in": "query",
    "description": "for a frame: recorded and shown, never trained; a JSON group has a field for it",
    "schema": {"type": "boolean", "default": False},
}
_TIMEOUT = {
    "name": "timeout",
    "in": "query",
    "description": "seconds to wait while there is no room, at most 300; then 429",
    "schema": {"type": "number", "default": 20},
}
_ENCODING = {
    "name": "content-encoding",
    "in": "header",
    "description": "gzip, if the body is compressed",
    "schema": {"type": "string", "enum": ["gzip"]},
}
_OWN = {
    401: "no token, or a wrong one",
    408: "body too slow",
    411: "no content-length",
    413: "the body is too large, or would be when decompressed",
}


def describe(statuses: Mapping[type[PenstockError], int]) -> dict[str, Any]:
    """Return the description of all routes. `statuses` maps errors to HTTP statuses."""
    (group, put, asked, states, problem, *more), parts = msgspec.json.schema_components(
        [JsonGroup, Put, AskedGroups, States, Problem, AskedLease, Leased, AskedAttach, AttachedCounts],
        ref_template="#/components/schemas/{name}",
    )
    names: dict[int, list[str]] = defaultdict(list)
    for kind, status in statuses.items():
        names[status].append(kind.__name__)
    problems = {
        str(status): _answer(description, problem)
        for status, description in sorted(({s: ", ".join(found) for s, found in names.items()} | _OWN).items())
    }
    frame = {"schema": {"type": "string", "format": "binary"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": __version__, "description": "Put groups of rollouts into a plane."},
        "paths": {
            "/v1/groups": {
                "post": {
                    "operationId": "put_group",
                    "summary": "Put a group; it is durable when this is answered",
                    "parameters": [_EVALUATION, _TIMEOUT, _ENCODING],
                    "requestBody": {"required": True, "content": {"application/json": {"schema": group}, FRAME: frame}},
                    "responses": {
                        "201": _answer("the group is new, and durable", put),
                        "200": _answer("the plane already had this group", put),
                        "415": _answer("another content-type", problem),
                        **problems,
                    },
                }
            },
            "/v1/states": _asked(
                "get_states", "What became of groups", asked, problems, "the state of each group, by id", states
            ),
            **_scoring(more, problems),
            "/v1/status": _look("get_status", "The plane's status", problem),
            "/v1/ledger": _look("get_ledger", "The state of every accepted sample", problem),
        },
        "components": {
            "schemas": _opened(parts),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
    }


def _scoring(schemas: Sequence[Any], problems: Any) -> dict[str, Any]:
    """Describe what judges use."""
    asked, leased, values, counts = schemas
    none, durable = "samples; none if no group lacked the column in time", "Give samples a late value; durable"
    return {
        "/v1/lacking": _asked("lease_samples", "Lease samples that lack a column", asked, problems, none, leased),
        "/v1/attach": _asked("attach_values", durable, values, problems, "counts, in samples", counts),
    }


def _asked(name: str, summary: str, body: Any, problems: Any, words: str, answer: Any) -> dict[str, Any]:
    """Describe a small question that is asked with POST."""
    return {
        "post": {
            "operationId": name,
            "summary": summary,
            "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
            "responses": {"200": _answer(words, answer), **problems},
        }
    }


def _opened(schema: Any) -> Any:
    """Adapt schemas to what generators of clients make of them.

    Of an object without declared fields they assume that it has none, so it is said that it may have any. A field with
    a default they make one that every client must give, so a default is only named in the description.
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
