"""`ServeConfig`: every option of the server but those of the engine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mie.config.engine import check_settings, keyword_checked
from mie.config.settings import declared_in
from mie.errors import ConfigError
from mie.serve.keys import Keys


@keyword_checked
@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """The server's address, its keys, its limits, its logs, and how it ends."""

    SETTINGS: ClassVar = declared_in(__file__, "ServeConfig")

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
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: Sequence[str] | None = None
    root_path: str = ""
    page: bool = True
    strict: bool = False
    strict_openai: bool = False
    trust_request_chat_template: bool = False
    chat_template: str | None = None
    max_logprobs: int = 20
    highest_priority: int = 0
    keepalive_interval: float = 10.0
    max_chunks_per_second: float = 2000.0

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
