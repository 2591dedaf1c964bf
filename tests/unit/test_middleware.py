"""The correlation prefix: which requests are captured, under which id, and what the application sees."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from support.memory_sink import MemorySink
from token_id_capture.protocols import TokenSink, install_token_sink
from token_id_capture.server.middleware import TokenCaptureMiddleware
from token_id_capture.sink import CaptureContext, current_capture_context, reset_token_sink, set_token_sink

Message = dict[str, Any]


class Application:
    """Remembers what it was called with."""

    def __init__(self) -> None:
        self.scopes: list[Message] = []
        self.contexts: list[CaptureContext | None] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        self.contexts.append(current_capture_context())


async def called(
    target: str, sink: TokenSink | None, *, raw: bytes | None = None, kind: str = "http", **scope: Any
) -> tuple[Application, list[Message]]:
    """Call the middleware with a path; ``raw`` is its encoded form, where that differs."""
    app = Application()
    sent: list[Message] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    full = {
        "type": kind,
        "method": "POST",
        "path": target,
        "raw_path": target.encode() if raw is None else raw,
        "query_string": b"beta=true",
        "headers": [],
        **scope,
    }
    await TokenCaptureMiddleware(app, sink=sink)(full, receive, send)
    assert current_capture_context() is None
    return app, sent


@pytest.mark.parametrize(
    ("target", "rest"),
    [
        ("/ng-rollout/demo-1/training-token-capture/v1/chat/completions", "/v1/chat/completions"),
        ("/ng-rollout/demo-1/training-token-capture/", "/"),
        ("/ng-rollout/demo-1/training-token-capture", "/"),
        ("/ng-rollout/demo-1/training-token-capture/v1//x/", "/v1//x/"),
    ],
)
async def test_a_captured_request_loses_its_prefix_and_gets_a_context(target: str, rest: str) -> None:
    sink = MemorySink()
    app, sent = await called(target, sink)
    assert sent == []
    (scope,) = app.scopes
    assert (scope["path"], scope["raw_path"], scope["query_string"]) == (rest, rest.encode(), b"beta=true")
    (context,) = app.contexts
    assert context is not None
    assert (context.rollout_id, context.token_sink) == ("demo-1", sink)


async def test_each_request_is_a_call_of_its_own() -> None:
    target = "/ng-rollout/r1/training-token-capture/v1/x"
    contexts = [(await called(target, MemorySink()))[0].contexts[0] for _ in range(3)]
    assert len({context.model_call_id for context in contexts if context is not None}) == 3


async def test_a_correlated_request_without_the_capture_segment_is_not_captured() -> None:
    app, _ = await called("/ng-rollout/r1/v1/chat/completions", MemorySink())
    assert app.scopes[0]["path"] == "/v1/chat/completions"
    assert app.contexts == [None]


async def test_with_capture_off_only_the_prefix_goes() -> None:
    app, _ = await called("/ng-rollout/r1/training-token-capture/v1/x", None)
    assert app.scopes[0]["path"] == "/v1/x"
    assert app.contexts == [None]


@pytest.mark.parametrize("target", ["/v1/x", "/ng-rollout/r2/v1/x"])
async def test_a_request_that_is_not_captured_inherits_no_context_of_another(target: str) -> None:
    token = set_token_sink(CaptureContext("r1", "c1", MemorySink()))
    try:
        app = Application()
        scope = {"type": "http", "path": target, "headers": []}
        await TokenCaptureMiddleware(app, sink=MemorySink())(scope, None, None)  # type: ignore[arg-type]
        assert app.contexts == [None]
    finally:
        reset_token_sink(token)


async def test_an_installed_sink_is_used_where_none_is_configured() -> None:
    installed, configured = MemorySink(), MemorySink()
    install_token_sink(installed)
    try:
        for sink, used in ((None, installed), (configured, configured)):
            app, _ = await called("/ng-rollout/r1/training-token-capture/x", sink)
            assert app.contexts[0] is not None
            assert app.contexts[0].token_sink is used
    finally:
        install_token_sink(None)


@pytest.mark.parametrize(
    "target", ["/", "/v1/models", "/ng-rollouts/r1/x", "/x/ng-rollout/r1/training-token-capture/y"]
)
async def test_other_paths_are_untouched(target: str) -> None:
    app, sent = await called(target, MemorySink())
    assert sent == []
    assert app.scopes[0]["path"] == target
    assert app.contexts == [None]


async def test_encoded_characters_behind_the_prefix_stay_encoded() -> None:
    prefix = "/ng-rollout/r1/training-token-capture"
    app, _ = await called(f"{prefix}/v1/models/a b", MemorySink(), raw=f"{prefix}/v1/models/a%20b".encode())
    assert (app.scopes[0]["path"], app.scopes[0]["raw_path"]) == ("/v1/models/a b", b"/v1/models/a%20b")


@pytest.mark.parametrize(
    ("target", "raw"),
    [
        ("/ng-rollout", None),
        ("/ng-rollout/", None),
        ("/ng-rollout//training-token-capture/x", None),
        ("/ng-rollout/.hidden/training-token-capture/x", None),
        ("/ng-rollout/../training-token-capture/x", None),
        ("/ng-rollout/a b/training-token-capture/x", b"/ng-rollout/a%20b/training-token-capture/x"),
        ("/ng-rollout/é/training-token-capture/x", b"/ng-rollout/%C3%A9/training-token-capture/x"),
        (f"/ng-rollout/{'r' * 201}/training-token-capture/x", None),
        ("/ng-rollout/r1/training-token-capture/x", b"/ng-rollout/%721/training-token-capture/x"),
        ("/ng-rollout/r1/training-token-capture/x", b"/ng-rollout/r1/%74raining-token-capture/x"),
        ("/ng-rollout/r1/training-token-capture/x", b"/ng-rollout/r1%2Ftraining-token-capture/x"),
        ("/ng-rollout/r1/training-token-capture/x", b"/ng-rollout/r1/training-token-capture%2Fx"),
        ("/ng-rollout/r1/training-token-capture/x", b"/%6Eg-rollout/r1/training-token-capture/x"),
        ("/ng-rollout/r1\n/training-token-capture/x", b"/ng-rollout/r1%0A/training-token-capture/x"),
    ],
)
async def test_a_malformed_or_encoded_id_is_refused_and_never_repaired(target: str, raw: bytes | None) -> None:
    app, sent = await called(target, MemorySink(), raw=raw)
    assert app.scopes == []
    assert sent[0]["status"] == 400
    error = orjson.loads(sent[1]["body"])["error"]
    assert error["code"] == "invalid_rollout_id"
    assert error["type"] == "invalid_request_error"


async def test_a_server_below_another_path_is_served_there() -> None:
    app, _ = await called("/deep/ng-rollout/r1/training-token-capture/v1/x", MemorySink(), root_path="/deep")
    assert (app.scopes[0]["path"], app.scopes[0]["raw_path"]) == ("/deep/v1/x", b"/deep/v1/x")
    assert app.contexts[0] is not None


async def test_a_websocket_handshake_of_a_captured_rollout_gets_426() -> None:
    target = "/ng-rollout/r1/training-token-capture/v1/responses"
    app, sent = await called(target, MemorySink(), headers=[(b"upgrade", b"WebSocket")])
    assert app.scopes == []
    assert sent[0]["status"] == 426
    app, sent = await called(target, MemorySink(), kind="websocket", extensions={"websocket.http.response": {}})
    assert (sent[0]["type"], sent[0]["status"]) == ("websocket.http.response.start", 426)
    app, sent = await called(target, MemorySink(), kind="websocket")
    assert sent == [{"type": "websocket.close", "code": 1000}]
    assert app.scopes == []


async def test_other_scopes_pass_through() -> None:
    app, _ = await called("", MemorySink(), kind="lifespan")
    assert app.scopes[0]["type"] == "lifespan"


@pytest.mark.parametrize("rest", ["", "/v1/messages", "/agent/x"])
async def test_a_path_step_names_the_agent_of_a_call(rest: str) -> None:
    app, _ = await called(f"/ng-rollout/demo-1/agent/planner/training-token-capture{rest}", MemorySink())
    (context,) = app.contexts
    assert context is not None
    assert (context.rollout_id, context.origin.agent, context.origin.parent_agent) == ("demo-1", "planner", "main")
    assert app.scopes[0]["path"] == (rest or "/")
    assert app.scopes[0]["raw_path"] == (rest or "/").encode()


@pytest.mark.parametrize("name", ["", "a b", "-x", "x" * 201])
async def test_a_malformed_agent_name_is_refused(name: str) -> None:
    app, sent = await called(f"/ng-rollout/demo-1/agent/{name}/training-token-capture/v1/messages", MemorySink())
    assert (app.scopes, sent[0]["status"]) == ([], 400)
    assert b"agent name" in sent[1]["body"]


async def test_without_the_capture_segment_an_agent_step_is_the_engines() -> None:
    app, _ = await called("/ng-rollout/demo-1/agent/planner/v1/messages", MemorySink())
    assert (app.contexts, app.scopes[0]["path"]) == ([None], "/agent/planner/v1/messages")
