"""The options of the commands that talk to an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from token_id_capture.cli.options import LogFormat
from token_id_capture.server.defaults import Continuity, HistorySetting, InlineSystemSetting, Streaming

UpstreamOption = Annotated[
    str,
    typer.Option("--upstream", "-u", envvar="TOKCAP_UPSTREAM", metavar="URL", help="The engine's address."),
]
UpstreamsOption = Annotated[
    list[str],
    typer.Option(
        "--upstream",
        "-u",
        envvar="TOKCAP_UPSTREAM",
        metavar="URL",
        help="The engine's address. Repeat it to share rollouts among engines of one model; in the variable, "
        "separate addresses with blanks.",
    ),
]
EngineOption = Annotated[
    str,
    typer.Option(
        envvar="TOKCAP_ENGINE",
        help="How the engine sends token ids: auto (asks it), vllm, sglang, llama-cpp, message, a name that a package "
        "registered, or module:Class.",
    ),
]
StreamingOption = Annotated[
    Streaming,
    typer.Option(
        envvar="TOKCAP_STREAMING",
        help="Whether to ask the engine for a stream if the client wants one. With never, the client's stream is "
        "made from the whole response; with auto, only if the engine's stream would lack ids.",
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        envvar="TOKCAP_MODEL",
        metavar="NAME",
        help="The engine's model for calls in Messages, Responses or Gemini, whatever model they name; responses "
        "repeat the client's name.",
    ),
]
MaxTokensOption = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        envvar="TOKCAP_MAX_TOKENS",
        min=1,
        help="The most tokens that such a call asks the engine for. Claude Code asks for 32,000 or more, and engines "
        "refuse requests that exceed their context.",
    ),
]
InlineSystemOption = Annotated[
    InlineSystemSetting,
    typer.Option(
        envvar="TOKCAP_INLINE_SYSTEM",
        help="System messages that follow other messages in such calls. keep: send them as they are; user: send "
        "their text as the user's; merge: add it to the first system message; auto: keep, or user if the "
        "engine's template refuses them.",
    ),
]
HistoryOption = Annotated[
    HistorySetting,
    typer.Option(
        envvar="TOKCAP_HISTORY",
        help="What to do about history that clients rewrote in such calls. exact: undo it; full: also restore the "
        "reasoning that they dropped; off: leave it.",
    ),
]
ContinuityOption = Annotated[
    Continuity,
    typer.Option(
        envvar="TOKCAP_CONTINUITY",
        help="When a request continues a captured call, send its exact tokens instead of rendering the history "
        "again: off, template (only if both decode to the same text) or exact (also the meaning of "
        "--continuity alone). Works with vllm (0.27 or newer), sglang and message.",
    ),
]
ChatHistoryOption = Annotated[
    HistorySetting,
    typer.Option(
        envvar="TOKCAP_CHAT_HISTORY",
        help="The same for calls in chat completions; off sends the client's own bytes.",
    ),
]
TokenizePromptsOption = Annotated[
    bool,
    typer.Option(
        "--tokenize-prompts",
        envvar="TOKCAP_TOKENIZE_PROMPTS",
        help="Ask the engine's tokenizer for prompt ids that its responses lack (llama-server): one or two more "
        "requests a call.",
    ),
]
UpstreamKeyOption = Annotated[
    Path | None,
    typer.Option(
        "--upstream-api-key-file",
        envvar="TOKCAP_UPSTREAM_API_KEY_FILE",
        metavar="PATH",
        help="A file with the engine's key; it is sent as a bearer token in place of the client's.",
    ),
]
HostOption = Annotated[str, typer.Option(envvar="TOKCAP_HOST", help="The address to listen on.")]
PortOption = Annotated[
    int, typer.Option(min=0, max=65535, envvar="TOKCAP_PORT", help="The port to listen on; 0 takes a free one.")
]
WorkersOption = Annotated[
    int, typer.Option(min=1, envvar="TOKCAP_WORKERS", help="Server processes; one that dies is replaced.")
]
KeyOption = Annotated[
    Path | None,
    typer.Option(envvar="TOKCAP_API_KEY_FILE", metavar="PATH", help="A file with the key that callers must send."),
]
HandOffKeyOption = Annotated[
    Path | None,
    typer.Option(
        "--hand-off-key-file",
        envvar="TOKCAP_HAND_OFF_KEY_FILE",
        metavar="PATH",
        help="A file with the key that trainers on other machines send to take finished rollouts at /hand-off. "
        "It must differ from that of --api-key-file.",
    ),
]
OperatorKeyOption = Annotated[
    Path | None,
    typer.Option(
        "--operator-key-file",
        envvar="TOKCAP_OPERATOR_KEY_FILE",
        metavar="PATH",
        help="A file with the operator key, the only one that then opens /admin; without it, engines cannot be added "
        "or removed. It must differ from that of --api-key-file.",
    ),
]
InsecureOption = Annotated[
    bool,
    typer.Option("--insecure", envvar="TOKCAP_INSECURE", help="Let other machines connect without a key."),
]
ConcurrencyOption = Annotated[
    int,
    typer.Option(
        min=0,
        envvar="TOKCAP_MAX_CONCURRENT_CALLS",
        help="Calls that one worker serves at once; further calls get 503. 0: no limit.",
    ),
]
FreeSpaceOption = Annotated[
    int,
    typer.Option(
        min=0,
        envvar="TOKCAP_FREE_SPACE_FLOOR",
        metavar="BYTES",
        help="With less free space on the database's disk, calls get 503 before the engine is asked. "
        "A small volume, such as a /dev/shm of 64 MB, needs a lower floor.",
    ),
]
ShutdownOption = Annotated[
    int,
    typer.Option(
        min=0,
        envvar="TOKCAP_SHUTDOWN_SECONDS",
        metavar="SECONDS",
        help="How long calls in flight may take after the server is told to stop.",
    ),
]
DrainOption = Annotated[
    float | None,
    typer.Option(
        envvar="TOKCAP_DRAIN_SECONDS",
        metavar="SECONDS",
        help="How long the engine may still take for a call whose client hung up. Default: 600.",
    ),
]
ConnectTimeoutOption = Annotated[
    float | None,
    typer.Option(
        envvar="TOKCAP_CONNECT_TIMEOUT",
        metavar="SECONDS",
        help="How long connecting to the engine may take. Default: 10.",
    ),
]
ReadTimeoutOption = Annotated[
    float | None,
    typer.Option(
        envvar="TOKCAP_READ_TIMEOUT",
        metavar="SECONDS",
        help="The longest silence of the engine within a response. Default: 3600.",
    ),
]
ClientTimeoutOption = Annotated[
    float | None,
    typer.Option(
        envvar="TOKCAP_CLIENT_TIMEOUT",
        metavar="SECONDS",
        help="How long a client may pause while it sends its request or reads the response. Default: 300.",
    ),
]
HeadTimeoutOption = Annotated[
    float | None,
    typer.Option(
        envvar="TOKCAP_HEAD_TIMEOUT",
        metavar="SECONDS",
        help="How long a connection may take to send the head of a request. Default: 10.",
    ),
]
BodyLimitOption = Annotated[
    int | None,
    typer.Option(
        envvar="TOKCAP_BODY_LIMIT",
        metavar="BYTES",
        help="The longest body of a request. Default: 67108864.",
    ),
]
BodyBytesOption = Annotated[
    int | None,
    typer.Option(
        envvar="TOKCAP_BODY_BYTES_IN_FLIGHT",
        metavar="BYTES",
        help="Bytes of request bodies that one worker holds at once; further calls get 503. Default: 2147483648.",
    ),
]
LogProbsModeOption = Annotated[
    str | None,
    typer.Option(
        envvar="TOKCAP_LOG_PROBS_MODE",
        metavar="MODE",
        help="The engine's log probability mode, such as raw_logprobs; stored with each call.",
    ),
]
SessionHeadersOption = Annotated[
    str | None,
    typer.Option(
        envvar="TOKCAP_SESSION_HEADERS",
        metavar="NAMES",
        help="The request headers that are stored, separated by commas. Default: those of known harnesses.",
    ),
]
AllowedHostsOption = Annotated[
    str | None,
    typer.Option(
        envvar="TOKCAP_ALLOWED_HOSTS",
        metavar="NAMES",
        help="Names, separated by commas, under which a gateway without a key may be called.",
    ),
]
LogFormatOption = Annotated[
    LogFormat, typer.Option(envvar="TOKCAP_LOG_FORMAT", help="Lines for people, or JSON objects.")
]
AccessLogOption = Annotated[
    bool,
    typer.Option("--access-log", envvar="TOKCAP_ACCESS_LOG", help="Log every request, not only what went wrong."),
]
TracesOption = Annotated[
    bool,
    typer.Option(
        "--traces",
        envvar="TOKCAP_TRACES",
        help="Send an OpenTelemetry span of each call to OTEL_EXPORTER_OTLP_ENDPOINT (extra traces).",
    ),
]
CheckOption = Annotated[
    bool,
    typer.Option(
        envvar="TOKCAP_CHECK", help="Start only if the engine answers a few test calls and they are captured."
    ),
]


class ServeCommand(TyperCommand):
    """Takes ``--continuity`` without a value for ``--continuity exact``, which the option parser cannot."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give a bare ``--continuity`` its value."""
        following = [*args[1:], "-"]
        alone = [arg == "--continuity" and after.startswith("-") for arg, after in zip(args, following, strict=True)]
        given = [f"{arg}=exact" if bare else arg for arg, bare in zip(args, alone, strict=True)]
        return super().parse_args(ctx, given)
