"""Spans of captured calls, received by OTLP as a collector receives them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from support.made_up import BODY, CHAT, answering, chat
from support.replay import running_gateway


class Collector:
    """An OTLP receiver over HTTP, and the spans that came."""

    def __init__(self) -> None:
        self.url = ""
        self.spans: list[Any] = []
        self.services: set[str] = set()

    async def receive(self, request: web.Request) -> web.Response:
        exported = ExportTraceServiceRequest.FromString(await request.read())
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
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    received.url = site.name
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
    assert described.pop("server.address") == gateway.engine.url
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
