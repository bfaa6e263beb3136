"""A plane sends a span for every stage of a group, with OpenTelemetry's own packages over real HTTP."""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

import penstock as ps
from penstock.errors import MissingExtra
from penstock.plane.group_spans import GroupSpans
from tests.support.groups import named_group

STAGES = ["put", "planned", "delivered", "committed"]


class Collector(BaseHTTPRequestHandler):
    bodies: ClassVar[list[bytes]]

    def do_POST(self) -> None:
        self.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None: ...  # noqa: A002 - the base class's name


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function that returns what was sent so far: (group, stage, trace, begin, end, attributes)."""
    pytest.importorskip(
        "opentelemetry.exporter.otlp.proto.http", reason="needs opentelemetry's exporter: pip install '.[otel]'"
    )
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    class Handler(Collector):
        bodies: ClassVar[list[bytes]] = []

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")

        def sent() -> list[Any]:
            found = []
            for body in Handler.bodies:
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    names = {one.key: one.value.string_value for one in resource.resource.attributes}
                    assert names["service.name"] == "penstock"
                    for span in (span for scope in resource.scope_spans for span in scope.spans):
                        values = {one.key: one.value.string_value or one.value.int_value for one in span.attributes}
                        times = (span.start_time_unix_nano, span.end_time_unix_nano)
                        found.append((values["penstock.group"], span.name, span.trace_id, *times, values))
            return found

        yield sent
        server.shutdown()


def test_a_group_is_put_planned_delivered_and_committed_in_one_trace(tmp_path: Path, spans: Any) -> None:
    settings: dict[str, Any] = {"ranks": 1, "seq_len": 64, "groups_per_step": 2, "traces": True}
    with ps.open(tmp_path / "run", **settings) as plane:
        for name in ("a", "b", "c", "d"):
            plane.put(named_group(name, samples=3))
    with ps.open(tmp_path / "run", **settings) as plane, plane.source(0) as source:  # a restart keeps the traces
        for _ in range(2):
            source.commit(source.step(timeout=60))
        source.flush()
    stages: dict[str, list[Any]] = defaultdict(list)
    for group, *rest in spans():
        stages[group].append(rest)
    assert sorted(stages) == ["a", "b", "c", "d"]
    for group, rows in stages.items():
        assert [row[0] for row in rows] == STAGES
        assert len({row[1] for row in rows}) == 1, "one trace"
        assert all(begin <= end for _, _, begin, end, _ in rows)
        assert rows[1][3] == rows[2][2] and rows[2][3] == rows[3][2], "each begins where the one before ended"
        assert [row[4].get("penstock.step") for row in rows] == [None, *[1 + (group in "cd")] * 3]
        assert {row[4]["penstock.samples"] for row in rows} == {3}
    assert len({rows[0][1] for rows in stages.values()}) == 4, "each group its own"


def test_without_the_package_a_plane_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [module for module in sys.modules if module.partition(".")[0] == "opentelemetry"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(MissingExtra, match=r"penstock-rl\[otel\]"):
        GroupSpans("run", "0")
