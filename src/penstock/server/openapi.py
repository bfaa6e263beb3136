"""What the HTTP API says of itself, as OpenAPI 3.1: made of the records that it reads, so it says what is so."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.convert import JsonGroup
from penstock.errors import PenstockError
from penstock.version import __version__

FRAME = "application/x-penstock-frame"
"""The media type of a frame."""


class Put(msgspec.Struct, kw_only=True):
    """A group that is durable."""

    group: str
    samples: int
    new: bool
    """False: this very group was there already."""
    over_length: dict[str, int] | None = None
    """truncated_samples, truncated_tokens, dropped_samples, dropped_tokens; absent where no sample is too long."""


class Problem(msgspec.Struct, kw_only=True):
    """Why not."""

    error: str
    """The class of the error in penstock.errors."""
    message: str
    retry_after_s: float | None = None


_EVALUATION = {
    "name": "evaluation",
    "in": "query",
    "description": "of a frame: recorded and shown, never trained; a JSON group says so itself",
    "schema": {"type": "boolean", "default": False},
}
_TIMEOUT = {
    "name": "timeout",
    "in": "query",
    "description": "seconds to wait in line while there is no room, at most 300; then 429",
    "schema": {"type": "number", "default": 20},
}
_OWN = {401: "no token, or another", 408: "the body was too slow", 411: "no content-length", 413: "too large a body"}


def describe(statuses: Mapping[type[PenstockError], int]) -> dict[str, Any]:
    """The description of all routes; `statuses` are those of errors."""
    (group, put, problem), parts = msgspec.json.schema_components(
        [JsonGroup, Put, Problem], ref_template="#/components/schemas/{name}"
    )
    names: dict[int, list[str]] = defaultdict(list)
    for kind, status in statuses.items():
        names[status].append(kind.__name__)
    problems = {
        str(status): _answer(words, problem)
        for status, words in sorted(({s: ", ".join(found) for s, found in names.items()} | _OWN).items())
    }
    frame = {"schema": {"type": "string", "format": "binary"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": __version__, "description": "Put groups of rollouts into a plane."},
        "paths": {
            "/v1/groups": {
                "post": {
                    "operationId": "put_group",
                    "summary": "Hand a group over; it is durable when this is answered",
                    "parameters": [_EVALUATION, _TIMEOUT],
                    "requestBody": {"required": True, "content": {"application/json": {"schema": group}, FRAME: frame}},
                    "responses": {
                        "201": _answer("the group is new, and durable", put),
                        "200": _answer("this very group was there already", put),
                        "415": _answer("another content-type", problem),
                        **problems,
                    },
                }
            },
            "/v1/status": _look("get_status", "Where everything is", problem),
            "/v1/ledger": _look("get_ledger", "What became of every sample that was accepted", problem),
        },
        "components": {
            "schemas": parts,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
    }


def _look(name: str, summary: str, problem: Any) -> dict[str, Any]:
    answers = {"200": _answer(summary, {"type": "object"}), "401": _answer(_OWN[401], problem)}
    return {"get": {"operationId": name, "summary": summary, "responses": answers}}


def _answer(words: str, schema: Any) -> dict[str, Any]:
    return {"description": words, "content": {"application/json": {"schema": schema}}}
