"""The options of what surrounds the routes: sockets, keys, limits, logs, shutdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mie.config.settings import setting
from mie.serve.keys import Keys


@dataclass(frozen=True, kw_only=True)
class EdgeSettings:
    """How the server is reached, who may use it, how much, and how it ends."""

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
