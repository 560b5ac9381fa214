"""`ServeConfig`: every option of the server that is not the engine's."""

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mie.base.files import read_utf8
from mie.config.engine import check_settings, keyword_checked, refuse_unknown
from mie.config.settings import declared_in
from mie.errors import ConfigError, needing_extra, shown
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
    max_answer_bytes: int | None = None
    log_format: str = "text"
    log_prompts: bool = False
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: Sequence[str] | None = None
    models_dir: str | None = None
    models_memory: int | None = None
    models_max: int | None = None
    root_path: str = ""
    page: bool = True
    demo: bool = False
    strict: bool = False
    strict_openai: bool = False
    trust_request_chat_template: bool = False
    chat_template: str | None = None
    max_logprobs: int = 20
    highest_priority: int = 0
    keepalive_interval: float = 10.0
    max_chunks_per_second: float = 2000.0
    allow_runtime_lora_updating: bool = False

    def __post_init__(self) -> None:
        check_settings(self)
        for name in ("models_memory", "models_max"):
            if getattr(self, name) is not None and self.models_dir is None:
                raise ConfigError(f"{name} needs models_dir, the folder of several models")
        names: object = self.served_model_name
        if isinstance(names, str) or (names is not None and not all(names)):  # type: ignore[arg-type]
            raise ConfigError(f"served_model_name must be a list of names; got {names!r}")
        _check_each("allowed_hosts", self.allowed_hosts, _HOST, "name without scheme or port")
        _check_each("allowed_origins", self.allowed_origins, _ORIGIN, "scheme://name[:port]")

    def max_waiting(self, max_num_seqs: int) -> int:
        """Return how many requests of a client may wait: by default four for each seat."""
        most = self.max_num_queued_reqs
        return 4 * max_num_seqs if most is None else most

    @property
    def has_keys(self) -> bool:
        """Whether anything needs a key, so that the page needs a login."""
        return self.keys is not None or self.admin_keys is not None


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


# Options in a YAML file.


def arguments_of(file: str, options: Collection[str]) -> list[str]:
    """Return the arguments of the command line that a file stands for.

    The file is a mapping of options without their dashes: ``max-num-seqs: 32``, or
    ``max_num_seqs``. A switch is true or false, and an option with several values has a list.

    Raises:
        ConfigError: the file is not such a mapping, or has an option that is not in ``options``.
        MissingExtraError: the extra ``serve`` is not installed.
    """
    with needing_extra("serve", "--config"):
        import yaml
    try:
        values = yaml.safe_load(read_utf8(file))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    if values is None:
        return []
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise ConfigError(f"{file} must have lines such as 'port: 9000'; got {shown(values)}")
    named = {f"--{name.replace('_', '-')}": value for name, value in values.items()}
    refuse_unknown(file, named, [each for each in options if each not in ("--config", "--help")])
    return [text for name, value in named.items() for text in _arguments(name, value, options)]


def _arguments(name: str, value: Any, options: Collection[str]) -> Iterator[str]:
    """Return the command line's words for one line of the file."""
    negation = name.replace("--", "--no-", 1)
    if isinstance(value, bool):
        if negation not in options:
            raise ConfigError(f"{name[2:]} is {value} in the file, and needs a value")
        yield name if value else negation
    elif isinstance(value, list) and name == "--api-key":
        yield from (f"{name}={each}" for each in value)
    elif isinstance(value, list):
        yield from (name, *map(str, value))
    else:
        yield f"{name}={json.dumps(value) if isinstance(value, dict) else value}"
