"""The options of what surrounds the routes: sockets, keys, limits, logs, shutdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mie.config.settings import declared_in
from mie.serve.keys import Keys


@dataclass(frozen=True, kw_only=True)
class EdgeSettings:
    """How the server is reached, who may use it, how much, and how it ends."""

    SETTINGS: ClassVar = declared_in(__file__, "EdgeSettings")

    uds: str | None = None
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    allowed_hosts: Sequence[str] | None = None
    allowed_origins: Sequence[str] | None = None
    shutdown_timeout: float = 30.0
    watchdog_timeout: float = 60.0
    keys: Keys | None = None
    admin_keys: Keys | None = None
    share_prefix_cache: bool = False
    max_request_bytes: int = 8 * 2**20
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    log_format: str = "text"
    log_prompts: bool = False
    otlp_traces_endpoint: str | None = None
