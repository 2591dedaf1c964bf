"""Spans of captured calls, received by OTLP as a collector receives them."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from support.made_up import BODY, CHAT, answering, chat
from support.replay import running_gateway, until
from token_id_capture.errors import ConfigurationError
from token_id_capture.server.app import create_app
from token_id_capture.server.settings import GatewaySettings
from token_id_capture.server.tracing.sending import Batching, Destination, Sender
from token_id_capture.server.tracing.spans import EndedCall, request, resource_head, trace_head
from token_id_capture.store import TokenCaptureStore


class Collector:
    """An OTLP receiver over HTTP, and the spans that came."""

    def __init__(self) -> None:
        self.url = ""
        self.spans: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.refusals = 0
        self.services: set[str] = set()

    async def receive(self, request: web.Request) -> web.Response:
        if self.refusals:
            self.refusals -= 1
            return web.Response(status=503)
        exported = ExportTraceServiceRequest.FromString(await request.read())
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        for resource in exported.resource_spans:
            self.services |= {it.value.string_value for it in resource.resource.attributes if it.key == "service.name"}
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        return web.Response()

    def attributes(self, number: int) -> dict[str, Any]:
        """The attributes of a span as Python values."""
        found = {}
        for pair in self.spans[number].attributes:
            kind = pair.value.WhichOneof("value")
            value = getattr(pair.value, kind)
            found[pair.key] = [it.string_value for it in value.values] if kind == "array_value" else value
        return found


@pytest.fixture
async def collector(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Collector]:
    received = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", received.receive)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    received.url = f"http://{host}:{port}"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", received.url)
    yield received
    await runner.cleanup()


async def test_each_call_is_a_span_of_its_rollout_with_what_became_of_it(tmp_path: Path, collector: Collector) -> None:
    async with running_gateway(tmp_path, traces=True) as gateway:
        gateway.engine.handler = answering(chat([5, 6], [-0.1, -0.2]))
        await gateway.post(CHAT, BODY)
        gateway.engine.handler = answering({"error": {"message": "too long"}}, status=400)
        await gateway.post(CHAT, BODY)
        gateway.engine.handler = answering(chat([5], [-0.1]))
        await gateway.post(CHAT, BODY, rollout="r2")
        gateway.engine.handler = answering({"error": {"message": "out of memory"}}, status=500)
        await gateway.post(CHAT, BODY, rollout="r2")
    captured, refused, other, lost = range(4)
    assert len(collector.spans) == 4
    assert collector.services == {"tokcap"}
    described = collector.attributes(captured)
    assert described.pop("tokcap.model_call_id")
    assert f"http://{described.pop('server.address')}:{described.pop('server.port')}" == gateway.engine.url
    assert described == {
        "gen_ai.operation.name": "chat",
        "gen_ai.conversation.id": "r1",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.id": "chat-1",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 2,
    }
    assert collector.attributes(refused)["error.type"] == "refused"
    assert collector.attributes(lost)["error.type"] == "unknown_outcome"
    traces = [span.trace_id for span in collector.spans]
    assert traces[captured] == traces[refused] != traces[other] == traces[lost]
    assert all(0 < span.start_time_unix_nano <= span.end_time_unix_nano for span in collector.spans)
    assert b"too long" not in b"".join(span.SerializeToString() for span in collector.spans)


async def test_without_traces_nothing_is_sent(tmp_path: Path, collector: Collector) -> None:
    async with running_gateway(tmp_path) as gateway:
        gateway.engine.handler = answering(chat([5], [-0.1]))
        await gateway.post(CHAT, BODY)
    assert collector.spans == []


async def test_a_collector_that_is_not_there_costs_no_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    async with running_gateway(tmp_path, traces=True) as gateway:
        gateway.engine.handler = answering(chat([5], [-0.1]))
        response = await gateway.post(CHAT, BODY)
        assert response.status == 200
        assert await gateway.entry()


async def test_variables_say_where_spans_go_and_of_which_rollouts(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "a-name")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20k,x-more=1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "gzip")
    collector.refusals = 1  # a collector that restarts: the batch is sent again
    async with running_gateway(tmp_path, traces=True) as gateway:
        gateway.engine.handler = answering(chat([5], [-0.1]))
        for number in range(20):
            for _ in range(2):
                await gateway.post(CHAT, BODY, f"r{number}")
        await until(lambda: _true(bool(collector.spans)))
    found = Counter(collector.attributes(number)["gen_ai.conversation.id"] for number in range(len(collector.spans)))
    assert 0 < len(found) < 20
    assert set(found.values()) == {2}
    assert collector.services == {"a-name"}
    (headers,) = {(it["authorization"], it["x-more"], it["content-encoding"]) for it in collector.headers}
    assert headers == ("Bearer k", "1", "gzip")


async def _true(value: bool) -> bool:
    return value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4317"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "brotli"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon"),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/not/there"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "0"),
    ],
)
def test_a_variable_that_is_not_usable_stops_the_start(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match="OTEL_"):
        create_app("http://127.0.0.1:9", TokenCaptureStore(tmp_path), settings=GatewaySettings(traces=True))


def test_any_call_is_a_span_that_protobuf_can_read() -> None:
    """Every length of a field that changes how it is written, text that is not UTF-8, and a URL with a password."""
    head = trace_head(b"t" * 16, b"p" * 8, "r" * 200)
    calls = [
        EndedCall(head, "c", 1, 2**63, "a" * 127, "", tokens, tokens, "m" * length, "i" * length, upstream, "stop")
        for tokens in (0, 127, 128, 2**32)
        for length in (1, 127, 128, 20_000)
        for upstream in ("http://user:hush@[::1]:8000/engine", "https://host")
    ]
    calls.append(EndedCall(head, "\ud800", 1, 2, None, "\ud800"))
    raw = request(resource_head({"service.name": "s", "process.pid": 7}), calls)
    (resource,) = ExportTraceServiceRequest.FromString(raw).resource_spans
    (scope,) = resource.scope_spans
    assert len(scope.spans) == len(calls)
    assert len({span.span_id for span in scope.spans}) == len(calls)
    for span, call in zip(scope.spans, calls, strict=True):
        told = {pair.key: pair.value for pair in span.attributes}
        assert (span.trace_id, span.parent_span_id, span.kind) == (b"t" * 16, b"p" * 8, span.SPAN_KIND_CLIENT)
        assert (span.start_time_unix_nano, span.end_time_unix_nano) == (call.begun, call.ended)
        assert told["gen_ai.conversation.id"].string_value == "r" * 200
        if not call.error:
            assert span.name == f"chat {call.model}"
            assert told["gen_ai.usage.output_tokens"].int_value == call.sampled
            assert told["gen_ai.response.id"].string_value == call.response_id
    addresses = {pair.value.string_value for span in scope.spans for pair in span.attributes if "address" in pair.key}
    assert addresses == {"::1", "host"}
    assert b"hush" not in raw
    assert scope.spans[-1].status.code == scope.spans[-1].status.STATUS_CODE_ERROR


def test_spans_that_nobody_takes_are_dropped_and_no_call_waits(caplog: pytest.LogCaptureFixture) -> None:
    taken = threading.Event()

    def write(calls: list[EndedCall]) -> bytes:
        taken.set()
        return b""

    nowhere = Destination("http://127.0.0.1:9/v1/traces", {}, 0.1, compress=False, tls=None)
    sender = Sender(nowhere, Batching(most=4, seconds=60.0, each=4), write)
    for _ in range(9):
        sender.add(EndedCall(b"", "c", 1, 2, None, ""))
    assert taken.wait(10)
    sender.close()
    assert "4 spans are lost, as the collector did not take them" in caplog.text


def test_a_collector_that_takes_a_connection_and_nothing_more_holds_up_the_end_for_seconds() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hung = Destination(f"http://127.0.0.1:{silent.getsockname()[1]}/", {}, 60.0, compress=False, tls=None)
        sender = Sender(hung, Batching(most=4, seconds=60.0, each=4), lambda calls: b"spans")
        sender.add(EndedCall(b"", "c", 1, 2, None, ""))
        began = time.monotonic()
        sender.close()
        assert time.monotonic() - began < 9
