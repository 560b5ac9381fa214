"""Options of ``mie serve`` in a YAML file."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import yaml

from mie.config.engine import refuse_unknown
from mie.errors import ConfigError, shown


def arguments_of(file: str, options: Collection[str]) -> list[str]:
    """Return the arguments of the command line that a file stands for.

    The file is a mapping of options without their dashes: ``max-num-seqs: 32``, or
    ``max_num_seqs``. A switch is true or false, and an option with several values has a list.

    Raises:
        ConfigError: the file is not such a mapping, or has an option that is not in ``options``.
    """
    try:
        values = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
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
