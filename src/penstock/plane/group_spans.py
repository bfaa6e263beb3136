"""Sends a span per group and stage to OpenTelemetry: put, planned, delivered, committed.

A span begins when the span before it ended, so its length is the time that the group waited for the stage. All spans
of a group share one trace. Its id is computed from run and group, so a restarted plane continues it:

    put                  |
    planned              |---------|              waited to be drawn into a step
    delivered                      |--|           every rank has read and verified it
    committed                         |------|    trained, and the optimizer step done
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

from penstock.extras import require
from penstock.log import GroupRow

MOST = 1 << 17
"""Groups whose last stage is remembered. The oldest are forgotten: a dropped group never reaches another stage."""


class GroupSpans:
    """Sends spans by the program's own tracer provider, or else over OTLP/HTTP as `OTEL_EXPORTER_OTLP_*` say."""

    def __init__(self, run: str, run_id: str) -> None:
        require("traces", "opentelemetry.sdk.trace", extra="otel")
        from opentelemetry import trace

        self._run, self._run_id = run, run_id
        self._since: OrderedDict[str, int] = OrderedDict()
        """When each group reached its last stage, in nanoseconds."""
        given = trace.get_tracer_provider()
        is_set = not isinstance(given, trace.ProxyTracerProvider)
        self._own = None if is_set else _otlp()
        self._tracer: Any = (self._own or given).get_tracer("penstock")

    def on_stage(self, stage: str, rows: Iterable[GroupRow], step: int = 0) -> None:
        """Send the spans of groups that have reached a stage. A step that is served again gives further spans."""
        now = time.time_ns()
        for row in rows:
            values: dict[str, str | int] = {
                "penstock.run": self._run,
                "penstock.group": row.id,
                "penstock.prompt": row.prompt,
            }
            values |= {"penstock.samples": row.samples, "penstock.tokens": row.tokens}
            if row.policy_version is not None:
                values["penstock.policy_version"] = row.policy_version
            if step:
                values["penstock.step"] = step
            began = self._since.pop(row.id, now)
            span = self._tracer.start_span(stage, context=self._trace_of(row.id), start_time=began, attributes=values)
            span.end(end_time=now)
            if stage != "committed":
                self._since[row.id] = now
        while len(self._since) > MOST:
            self._since.popitem(last=False)

    def _trace_of(self, group: str) -> Any:
        """Return a context whose trace belongs to the group. Sampled, unless the sampler decides by the trace's id."""
        from opentelemetry import trace

        digest = blake2b(f"{self._run_id} {group}".encode(), digest_size=24).digest()
        parent = trace.SpanContext(
            trace_id=int.from_bytes(digest[:16], "big"),
            span_id=int.from_bytes(digest[16:], "big"),
            is_remote=True,
            trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
        )
        return trace.set_span_in_context(trace.NonRecordingSpan(parent))

    def close(self) -> None:
        """Send what is queued."""
        if self._own is not None:
            self._own.shutdown()


def _otlp() -> Any:
    require("traces", "opentelemetry.exporter.otlp.proto.http", extra="otel")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    name = os.environ.get("OTEL_SERVICE_NAME", "penstock")
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
