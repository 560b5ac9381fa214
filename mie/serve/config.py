"""`ServeConfig`: every option of the server but those of the engine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mie.config.engine import check_settings, keyword_checked
from mie.config.settings import setting
from mie.errors import ConfigError
from mie.serve.keys import Keys


@keyword_checked
@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """The server's address, its keys, its limits, its logs, and how it ends."""

    uds: str | None = setting(
        None, "text", "Unix socket to listen on instead of host and port", "server"
    )
    ssl_keyfile: str | None = setting(None, "text", "private key for TLS (PEM)", "server")
    ssl_certfile: str | None = setting(None, "text", "certificate for TLS (PEM)", "server")
    ssl_ca_certs: str | None = setting(
        None, "text", "authorities whose certificate a client must show (PEM)", "server"
    )
    allowed_hosts: Sequence[str] | None = setting(
        None,
        "object",
        "names under which a server without keys is asked, besides localhost, host and IP "
        "addresses; '*.example.org' is each below it, and '*' is any",
        "server",
        default_text="none; with keys, any",
    )
    allowed_origins: Sequence[str] | None = setting(
        None,
        "object",
        "origins of web pages that may use the server; '*' is any",
        "server",
        default_text="none: CORS is off",
    )
    shutdown_timeout: float = setting(
        30.0,
        "number",
        "seconds that requests which run get to end after SIGTERM",
        "server",
    )
    watchdog_timeout: float = setting(
        60.0,
        "number",
        "seconds without a step, while there is work, after which /health is 503; 0: never",
        "server",
    )
    keys: Keys | None = setting(
        None, "object", "keys of which a request needs one", "access", default_text="no key needed"
    )
    admin_keys: Keys | None = setting(
        None,
        "object",
        "keys that alone may use /metrics, /reset_prefix_cache and what else is not for clients",
        "access",
        default_text="every key may",
    )
    share_prefix_cache: bool = setting(
        False,
        "switch",
        "share cached prefixes between keys, so that a client can learn from its hits what others "
        "send",
        "access",
    )
    max_request_bytes: int = setting(
        8 * 2**20,
        "size",
        "maximum size of a request's body",
        "requests",
        low=1,
        default_text="8MiB",
    )
    max_num_queued_reqs: int | None = setting(
        None,
        "integer",
        "maximum number of requests of one key that wait; more are answered with 429",
        "requests",
        default_text="4 times max_num_seqs",
    )
    max_num_queued_tokens: int | None = setting(
        None,
        "integer",
        "maximum number of tokens of one key's requests that wait; more are answered with 429",
        "requests",
        default_text="no limit",
    )
    log_format: str = setting(
        "text", "choice", "format of log lines", "logs", choices=("text", "json")
    )
    log_prompts: bool = setting(
        False, "switch", "write the prompts that clients send to the log", "logs"
    )
    otlp_traces_endpoint: str | None = setting(
        None,
        "text",
        "URL to which OpenTelemetry spans are sent, such as http://localhost:4318/v1/traces",
        "logs",
        default_text="no spans",
    )
    host: str = setting("127.0.0.1", "text", "address to listen on", "server")
    port: int = setting(
        8000, "integer", "port to listen on; 0 takes a free one", "server", low=0, high=65535
    )
    served_model_name: Sequence[str] | None = setting(
        None,
        "object",
        "names that clients may use for the model; answers carry the first",
        "server",
        default_text="the model as given",
    )
    root_path: str = setting(
        "",
        "text",
        "path under which a proxy serves this server, such as /llm",
        "server",
        default_text="none",
    )
    page: bool = setting(
        True, "switch", "show a web page at / with the engine's blocks and schedule", "server"
    )
    strict: bool = setting(
        False, "switch", "refuse request fields that the server does not know", "requests"
    )
    strict_openai: bool = setting(
        False, "switch", "refuse requests without a model, as OpenAI does", "requests"
    )
    trust_request_chat_template: bool = setting(
        False, "switch", "let requests bring a chat_template of their own", "requests"
    )
    chat_template: str | None = setting(
        None,
        "text",
        "file with a jinja2 chat template, or the name of one of the model's",
        "requests",
        default_text="the model's",
    )
    max_logprobs: int = setting(
        20,
        "integer",
        "maximum number of log-probabilities that a request may ask for at each position; -1 sets "
        "no limit",
        "requests",
        low=-1,
    )
    highest_priority: int = setting(
        0,
        "integer",
        "lowest number (first served) that a request's priority is clamped to",
        "requests",
        low=-(2**63),
        high=2**63 - 1,
    )
    keepalive_interval: float = setting(
        10.0,
        "number",
        "seconds without a token after which a stream gets a comment; 0 sends none",
        "requests",
    )

    max_chunks_per_second: float = setting(
        2000.0,
        "number",
        "maximum number of chunks that all streams together get in a second; tokens that come "
        "faster are merged; 0 sets no limit",
        "requests",
    )

    def __post_init__(self) -> None:
        check_settings(self)
        names: object = self.served_model_name
        if isinstance(names, str) or (names is not None and not all(names)):  # type: ignore[arg-type]
            raise ConfigError(f"served_model_name must be a list of names; got {names!r}")
        _check_each("allowed_hosts", self.allowed_hosts, _HOST, "name without scheme or port")
        _check_each("allowed_origins", self.allowed_origins, _ORIGIN, "scheme://name[:port]")


_HOST = re.compile(r"\*|(\*\.)?[\w.-]+", re.ASCII)
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s\"]+")


def _check_each(name: str, values: object, form: re.Pattern[str], what: str) -> None:
    """Raise `ConfigError` unless ``values`` is None or a list of texts of a form."""
    if values is None:
        return
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise ConfigError(f"{name} must be a list; got {values!r}")
    for each in values:
        if not isinstance(each, str) or not form.fullmatch(each):
            raise ConfigError(f"{name} must be like {what}, or '*'; got {each!r}")
