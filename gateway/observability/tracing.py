"""Traces by OpenTelemetry, with the extra `otel`: a span per request, a child for each stage.

Spans are made when the request has ended, from the times that were kept anyway: the way of a token does not change.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from gateway.generation.generation_state import GenerationState
from gateway.generation.time_account import GATEWAY, PREFILL, REPLAY, decode_s, decode_stages

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider

log = logging.getLogger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
SPANS = {
    "receive": "receive",
    "prepare": "prepare",
    "place": "place",
    "queue": "prefill queue",
    "load": "prefill load",
    "prefill": "prefill",
    "expect": "handoff expect",
    "land": "handoff land",
    "join": "decode join",
    "replay": "replay",
    "decode": "decode",
}
"""Stage -> name of its span."""
CLOSE_TIMEOUT_S = 3.0


def open_tracing(environ: Mapping[str, str], model: str, version: str) -> Tracing | None:
    """Return tracing by OpenTelemetry's own variables; None if they name no endpoint, or switch it off.

    Without the extra the log says so, and the gateway serves without traces.
    """
    if not is_configured(environ):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        named = next(name for name in ENDPOINTS if environ.get(name))
        log.warning("no traces: %s is set, and %s is not installed: install the extra 'otel'", named, error.name)
        return None
    is_named = environ.get("OTEL_SERVICE_NAME") or "service.name=" in environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    own = {"service.version": version} | ({} if is_named else {"service.name": "tandem-gateway"})
    provider = TracerProvider(resource=Resource.create(own), shutdown_on_exit=False)  # close() has a deadline
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracing(provider, model)


def is_configured(environ: Mapping[str, str]) -> bool:
    is_off = environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or environ.get("OTEL_TRACES_EXPORTER") == "none"
    return not is_off and any(environ.get(name) for name in ENDPOINTS)


class Tracing:
    """Makes traces of one gateway, for the processors of `provider`."""

    def __init__(self, provider: TracerProvider, model: str) -> None:
        self._provider = provider
        self._model = model
        self._tracer = provider.get_tracer("tandem.gateway")

    def begin(self, path: str, headers: Mapping[str, str]) -> Trace:
        return Trace(self, path, headers.get("traceparent", ""), headers.get("tracestate", ""))

    def close(self) -> None:
        """Send what waits, for as long as a stop may take."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)

    def record(
        self, trace: Trace, answer: GenerationState | None, facts: Mapping[str, Any], began_s: float, ended_s: float
    ) -> None:
        """End the request's span.

        `facts`: those of its log line; None was answered to one that was refused. Times are of the monotonic clock;
        spans have the wall clock's.
        """
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        wall = _Wall(time.time_ns() - time.monotonic_ns())
        attributes = _attributes(trace.path, self._model, facts)
        span = self._tracer.start_span(
            f"POST {trace.path}", trace.context, SpanKind.SERVER, attributes, start_time=wall.ns(began_s)
        )
        if facts["status"] >= 500:
            span.set_status(StatusCode.ERROR, facts["code"])
        children = [*own(facts.get("stages_s", {}), began_s), *(laid_out(answer) if answer is not None else [])]
        for stage, worker, begin_s, end_s in children:
            by = {"tandem.worker": worker} if worker else {}
            child = self._tracer.start_span(
                SPANS[stage], set_span_in_context(span), attributes=by, start_time=wall.ns(begin_s)
            )
            child.end(wall.ns(end_s))
        span.end(wall.ns(ended_s))


@dataclass(frozen=True)
class Trace:
    """What a request's span will be made of, kept until it ends."""

    tracing: Tracing
    path: str
    traceparent: str
    tracestate: str

    @property
    def context(self) -> Context:
        """The caller's span, if it told a sound one (W3C Trace Context)."""
        from opentelemetry.context import Context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {"traceparent": self.traceparent, "tracestate": self.tracestate}
        return TraceContextTextMapPropagator().extract(carrier, Context())

    def end(self, answer: GenerationState | None, facts: Mapping[str, Any], began_s: float, ended_s: float) -> None:
        self.tracing.record(self, answer, facts, began_s, ended_s)


Laid = list[tuple[str, str, float, float]]
"""Stage, worker, begin, end; on the gateway's clock."""


def own(told: Mapping[str, float], began_s: float) -> Laid:
    """The gateway's, one behind the other."""
    names = {stage: stage for stage in GATEWAY}
    return _laid(names, told, began_s + sum(told.get(stage, 0.0) for stage in GATEWAY), "")


def laid_out(answer: GenerationState) -> Laid:
    """Lay the stages of each worker so that the last ends when the gateway heard of it.

    Workers tell durations, for clocks of hosts are not compared. Of those that came in for a lost one only their
    tokens are laid.
    """
    if not (stints := answer.spans):
        return []
    told, first = answer.stages_s, stints[0]
    if len(stints) > 1:
        del told["decode"]  # of all of them
        if first.span_s > 0.0:
            told["decode"] = decode_s(told, first.span_s)
    laid = _laid(PREFILL, told, first.begin_s, first.servers.get("prefill", ""))
    laid += _laid(decode_stages(told), told, first.end_s, first.servers.get("decode", ""))
    for before, stint in pairwise(stints):
        worker = stint.servers.get("decode", "")
        laid += [(REPLAY, worker, before.end_s, stint.begin_s), ("decode", worker, stint.begin_s, stint.end_s)]
    return laid


def _laid(names: Mapping[str, str], told: Mapping[str, float], end_s: float, worker: str) -> Laid:
    known = [(stage, told[name]) for stage, name in names.items() if name in told]
    at_s = end_s - sum(span_s for _, span_s in known)
    spans: Laid = []
    for stage, span_s in known:
        spans.append((stage, worker, at_s, at_s + span_s))
        at_s += span_s
    return spans


def _attributes(path: str, model: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Names of the semantic conventions for HTTP and for generative models; the rest is ours."""
    names = {"prompt_tokens": "gen_ai.usage.input_tokens", "completion_tokens": "gen_ai.usage.output_tokens"}
    ours = ("id", "code", "cached_tokens", "ttft_s", "itl_mean_s", "epoch", "prefill", "decode")
    names |= {name: f"tandem.{name}" for name in ours}
    return {
        "http.request.method": "POST",
        "http.response.status_code": facts["status"],
        "url.path": path,
        "gen_ai.request.model": model,
        **{attribute: facts[name] for name, attribute in names.items() if facts.get(name) is not None},
    }


@dataclass(frozen=True)
class _Wall:
    """From the monotonic clock, in seconds, to the wall clock, in nanoseconds."""

    offset_ns: int

    def ns(self, monotonic_s: float) -> int:
        return int(monotonic_s * 1e9) + self.offset_ns
