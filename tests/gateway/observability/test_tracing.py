"""Spans of a request, through the gateway's own door, as the SDK's in-memory exporter gets them."""

import logging
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from gateway.generation.generation_state import AttemptSpan
from gateway.generation.time_account import decode_s, non_overlapped_transfer_s, stage_seconds
from gateway.observability.tracing import Tracing, is_configured, laid_out, open_tracing
from tests.gateway.gateway_rig import gateway, pair

pytestmark = pytest.mark.slow

ASK = {"prompt": "one two three", "max_tokens": 4}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
HANDED = {"prefill_queue": 0.1, "prefill_prefill": 0.4, "expect": 0.2, "land": 0.5, "queue": 0.01, "decode": 2.0}
LOCAL = {"prefill_queue": 0.1, "prefill_prefill": 0.4, "queue": 0.1, "prefill": 0.4, "decode": 2.0}


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
async def rig(checkpoint, exporter):
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with gateway(checkpoint, pair()) as rig:
        rig.front.tracing = Tracing(provider, "m")
        yield rig


async def ask(rig, exporter, body: dict, headers: dict[str, str] | None = None) -> tuple[Any, ...]:
    """Return the spans of one request in the order of their ends; its own is the last."""
    async with rig.client() as client:
        await client.post("/v1/completions", json=body, headers=headers)
    await rig.until(exporter.get_finished_spans)  # it may end after its answer has come
    return exporter.get_finished_spans()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_a_span_with_a_child_per_stage(rig, exporter, stream: bool) -> None:
    *children, request = await ask(rig, exporter, ASK | {"stream": stream})
    names = ["receive", "prepare", "place", "prefill queue", "prefill", "handoff expect", "handoff land", "decode join"]
    assert [child.name for child in children] == [*names, "decode"]
    assert (request.name, request.kind) == ("POST /v1/completions", SpanKind.SERVER)
    assert request.attributes["http.response.status_code"] == 200
    assert request.attributes["gen_ai.usage.output_tokens"] == 4
    assert request.attributes["gen_ai.request.model"] == "m"
    assert {child.parent.span_id for child in children} == {request.context.span_id}
    assert [child.attributes.get("tandem.worker") for child in children] == [None] * 3 + ["p0"] * 2 + ["d0"] * 4
    assert request.start_time == children[0].start_time < request.end_time
    assert all(child.start_time <= child.end_time <= request.end_time for child in children)


async def test_the_callers_trace_goes_on(rig, exporter) -> None:
    spans = await ask(rig, exporter, ASK, {"traceparent": PARENT, "tracestate": "a=b"})
    assert {f"{span.context.trace_id:032x}" for span in spans} == {PARENT.split("-")[1]}
    assert f"{spans[-1].parent.span_id:016x}" == PARENT.split("-")[2]
    assert spans[-1].context.trace_state["a"] == "b"


async def test_a_caller_that_does_not_record_is_heeded(rig, exporter) -> None:
    async with rig.client() as client:
        await client.post("/v1/completions", json=ASK, headers={"traceparent": f"{PARENT[:-2]}00"})
    spans = await ask(rig, exporter, ASK, {"traceparent": "nonsense"})
    assert [span.name for span in spans if span.parent is None] == ["POST /v1/completions"]


async def test_an_error_of_ours_is_one_in_the_trace(rig, exporter) -> None:
    rig.workers[1].refuse = 503
    spans = await ask(rig, exporter, ASK)
    assert spans[-1].attributes["http.response.status_code"] == 503
    assert (spans[-1].status.status_code, spans[-1].status.description) == (StatusCode.ERROR, "unavailable")


def test_stages_are_laid_back_from_what_the_gateway_heard() -> None:
    answer = SimpleNamespace(stages_s=HANDED, spans=[AttemptSpan({"prefill": "p", "decode": "d"}, 10.0, 13.0)])
    spans = laid_out(answer)  # type: ignore[arg-type]
    assert [(stage, worker) for stage, worker, _, _ in spans] == [
        ("queue", "p"),
        ("prefill", "p"),
        ("expect", "d"),
        ("land", "d"),
        ("join", "d"),
        ("decode", "d"),
    ]
    assert [end for _, _, _, end in spans] == pytest.approx([9.6, 10.0, 10.49, 10.99, 11.0, 13.0])
    assert laid_out(SimpleNamespace(stages_s={}, spans=[])) == []  # type: ignore[arg-type]


def test_a_worker_that_came_in_for_a_lost_one_is_laid_behind_it() -> None:
    stints = [
        AttemptSpan({"prefill": "p", "decode": "d"}, 10.0, 13.0),
        AttemptSpan({"prefill": "p", "decode": "e"}, 14.5, 15.0),
    ]
    answer = SimpleNamespace(stages_s=HANDED | {"replay": 1.5, "decode": 3.29}, spans=stints)
    behind = laid_out(answer)[-3:]  # type: ignore[arg-type]
    assert [(stage, worker) for stage, worker, _, _ in behind] == [("decode", "d"), ("replay", "e"), ("decode", "e")]
    ends = [at_s for _, _, begin_s, end_s in behind for at_s in (begin_s, end_s)]
    assert ends == pytest.approx([10.21, 13.0, 13.0, 14.5, 14.5, 15.0])


def test_where_no_worker_tells_the_end_decode_lasts_from_its_first_batch_on() -> None:
    assert decode_s(HANDED, 3.0) == pytest.approx(2.79)
    assert decode_s({"prefill_queue": 0.1, "prefill_prefill": 0.4}, 3.0) == 3.0


async def test_a_request_that_is_refused_is_in_the_callers_trace(rig, exporter) -> None:
    (span,) = await ask(rig, exporter, ASK | {"max_tokens": -1}, {"traceparent": PARENT})
    assert f"{span.parent.span_id:016x}" == PARENT.split("-")[2]
    assert span.attributes["http.response.status_code"] == 400 and span.attributes["tandem.code"] == "invalid_request"


def test_a_request_that_stayed_on_one_worker_has_its_stages_once() -> None:
    assert stage_seconds(LOCAL) == {"queue": 0.1, "prefill": 0.4, "decode": 2.0}
    assert stage_seconds(HANDED) == {
        "queue": 0.1,
        "prefill": 0.4,
        "expect": 0.2,
        "land": 0.5,
        "join": 0.01,
        "decode": 2.0,
    }
    assert stage_seconds({}) == {}


def test_a_handoff_is_felt_from_token_0_on() -> None:
    assert non_overlapped_transfer_s(HANDED) == pytest.approx(0.2)
    assert non_overlapped_transfer_s(HANDED | {"land": 0.1}) == 0.0
    assert non_overlapped_transfer_s(LOCAL) is None and non_overlapped_transfer_s({}) is None


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        (ENDPOINT, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x/v1/traces"}, True),
        (ENDPOINT | {"OTEL_SDK_DISABLED": "true"}, False),
        (ENDPOINT | {"OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_opentelemetrys_own_variables_say_whether(environ: dict[str, str], wanted: bool) -> None:
    assert is_configured(environ) is wanted


def test_without_the_extra_the_log_says_what_to_install(monkeypatch, caplog) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with caplog.at_level(logging.WARNING):
        assert open_tracing(ENDPOINT, "m", "0") is None
    assert "OTEL_EXPORTER_OTLP_ENDPOINT is set" in caplog.text and "install the extra 'otel'" in caplog.text


def record_one(tracing: Tracing) -> None:
    facts = {"status": 200, "code": "ok", "prompt_tokens": 1, "completion_tokens": 1}
    answer = SimpleNamespace(stages_s={}, spans=[])
    tracing.begin("/v1/completions", {}).end(answer, facts, 0.0, 1.0)  # type: ignore[arg-type]


class Collector(BaseHTTPRequestHandler):
    """Keeps what was posted to it, by path."""

    posted: ClassVar[list[tuple[str, bytes]]] = []

    def do_POST(self) -> None:
        self.posted.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the test says what matters."""


@pytest.mark.parametrize(("variables", "name"), [({}, "tandem-gateway"), ({"OTEL_SERVICE_NAME": "mine"}, "mine")])
def test_traces_reach_a_collector_under_the_services_name(monkeypatch, variables: dict[str, str], name: str) -> None:
    monkeypatch.setattr(Collector, "posted", [])
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{server.server_port}"} | variables
        for variable, value in environ.items():
            monkeypatch.setenv(variable, value)
        tracing = open_tracing(environ, "m", "0")
        assert tracing is not None
        record_one(tracing)
        tracing.close()
        server.shutdown()
    ((path, body),) = Collector.posted
    (told,) = ExportTraceServiceRequest.FromString(body).resource_spans
    resource = {entry.key: entry.value.string_value for entry in told.resource.attributes}
    assert path == "/v1/traces" and resource["service.name"] == name
    assert [span.name for scope in told.scope_spans for span in scope.spans] == ["POST /v1/completions"]


def test_tracing_closes_though_nobody_takes_the_traces(monkeypatch) -> None:
    monkeypatch.setattr("gateway.observability.tracing.CLOSE_TIMEOUT_S", 0.2)
    for name, value in (ENDPOINT | {"OTEL_EXPORTER_OTLP_TIMEOUT": "3"}).items():
        monkeypatch.setenv(name, value)
    before = set(threading.enumerate())
    tracing = open_tracing(ENDPOINT, "m", "0")
    assert tracing is not None
    record_one(tracing)
    tracing.close()
    exporting = set(threading.enumerate()) - before
    assert exporting, "close() must not wait for a send that goes on"
    for thread in exporting:  # it draws its pauses from the one `random` that other tests replay
        thread.join(30)
        assert not thread.is_alive()
