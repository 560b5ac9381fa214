"""``mie serve``: the model behind OpenAI's HTTP interface."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mie.cli.options import DEFAULT_MODEL, trace_file
from mie.cli.parser import Commands, declared
from mie.config.arguments import add_settings, given
from mie.config.engine_args import EngineArgs
from mie.config.settings import ON_CPU_THREADS
from mie.errors import ConfigError, needing_extra

if TYPE_CHECKING:
    from mie.load.directory import ModelsDirectory
    from mie.serve.config import ServeConfig
    from mie.serve.keys import Keys


_NOT_OPTIONS = ("model", "device")
"""Arguments of the engine that have no option here."""

_DEMO: dict[str, Any] = {
    "num_blocks": 48,
    "block_size": 8,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 48,
}
"""Settings of ``--demo``. They show blocks shared, copied and preempted at once."""
_DEFAULTS: dict[str, tuple[Any, str]] = {
    # Clients of chats expect reasoning beside the answer, not in it.
    "reasoning_parser": ("auto", "auto"),
    # One client alone is also served first come first served under this policy.
    "scheduling_policy": ("fair", "fair"),
    # Equal seeds give equal answers under any load.
    "batch_invariant": (
        True,
        "on where the backend keeps it: jit, or numpy, not plain, KV cache as computed",
    ),
}
"""Settings of the engine with the server's own defaults, and the help text of the defaults."""


def add_parser(commands: Commands) -> None:
    """Add ``mie serve`` to the command line."""
    from mie.serve.config import ServeConfig  # its packages are not imported with it

    parser = declared(
        commands,
        "serve",
        settings=partial(add_settings, cls=ServeConfig),
        engine=partial(EngineArgs.add_cli_args, omit=_omitted(ServeConfig)),
    )
    for action in parser._actions:
        if action.dest in _DEFAULTS:
            shown = f"default: {_DEFAULTS[action.dest][1]})"
            action.help = (action.help or "").rpartition("default: ")[0] + shown
    parser.set_defaults(run=lambda args: run(with_config_file(args, parser)))


def run(args: argparse.Namespace) -> int:
    """Serve until a signal ends the server: its exit code."""
    from mie.serve.config import ServeConfig

    if args.uds is not None and (args.host, args.port) != (None, None):
        raise ConfigError("--uds is given with --host or --port; give one of them")
    config = ServeConfig(
        **given(args, ServeConfig),
        served_model_name=args.served_model_name,
        allowed_hosts=args.allowed_hosts,
        allowed_origins=args.allowed_origins,
        keys=keys_of(args),
        admin_keys=admin_keys_of(args),
    )
    settings = with_quotas(engine_settings(args), config.keys)
    EngineArgs(**settings)  # refuses bad values before anything is opened
    of_ray = (args.replicas, args.ray_address, args.autoscaling)
    if any(each is not None for each in of_ray) and config.models_dir is None:
        return serve_on_ray(args, config, settings)
    with needing_extra("serve", "mie serve"):
        from mie.serve.router import ModelsEdge
        from mie.serve.server import serve
    from mie.frontend.async_llm import AsyncLLM

    if config.models_dir is not None:
        directory = models_directory(args, config, settings)
        return serve(
            lambda: ModelsEdge(directory, lambda each: AsyncLLM(**each.settings), config), config
        )
    with trace_file(args.trace) as file:
        return serve(lambda: AsyncLLM(**settings, trace=file), config)


_OF_ONE_MODEL = (
    *("served_model", "model", "served_model_name", "tokenizer", "tokenizer_revision", "revision"),
    *("hf_overrides", "chat_template", "trace", "replicas", "ray_address", "autoscaling"),
    *("enable_lora", "lora_modules", "max_loras", "max_lora_rank"),
)
"""Options that are for one model, and make no sense with ``--models-dir``."""


def models_directory(
    args: argparse.Namespace, config: ServeConfig, settings: Mapping[str, Any]
) -> ModelsDirectory:
    """Return the folder of ``--models-dir``.

    Raises:
        ConfigError: it cannot be read, or an option does not fit several models.
    """
    from mie.load.directory import ModelsDirectory

    for name in _OF_ONE_MODEL:
        if getattr(args, name, None) is not None:
            option = "MODEL" if name == "served_model" else f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{option} is for one model, and --models-dir for several; leave one of them out"
            )
    assert config.models_dir is not None
    folder = Path(config.models_dir).expanduser()
    return ModelsDirectory(folder, settings, config.models_memory)


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of the engine, with the server's defaults."""
    if args.model is not None and args.served_model not in (None, args.model):
        raise ConfigError(
            f"MODEL is {args.served_model} and --model is {args.model}; give one of them"
        )
    model = args.served_model or args.model or DEFAULT_MODEL
    from mie.serve.config import ServeConfig

    settings = given(args, EngineArgs, omit=_omitted(ServeConfig))
    demo = _DEMO if args.demo else {}
    return {**demo, **with_server_defaults(settings), "model": model}


def with_server_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of the engine, completed by the server's own defaults."""
    defaults = {name: value for name, (value, _) in _DEFAULTS.items()}
    if settings.get("backend", "auto") not in ON_CPU_THREADS:
        del defaults["batch_invariant"]
    return {**defaults, **settings}


def with_quotas(settings: Mapping[str, Any], keys: Keys | None) -> dict[str, Any]:
    """Return settings of the engine with the quotas of the keys' file.

    Raises:
        ConfigError: a key has a quota in the file and in ``client_quotas``.
    """
    declared = settings.get("client_quotas") or {}
    quotas = {} if keys is None else keys.quotas
    for name in declared.keys() & quotas.keys():
        raise ConfigError(f"key {name!r} has a quota in --api-key-file and in --client-quotas")
    return {**settings, "client_quotas": {**declared, **quotas}} if quotas else dict(settings)


def _omitted(config: type[ServeConfig]) -> tuple[str, ...]:
    """Return the arguments of the engine that have no option here, or an option of the server's."""
    return (*_NOT_OPTIONS, *config.__dataclass_fields__)


def keys_of(args: argparse.Namespace) -> Keys | None:
    """Return the keys of the command line, the environment and a file; None if there are none."""
    from mie.serve.keys import Keys

    of_environment = os.environ.get("MIE_API_KEY")
    keys = [*(args.api_key or ()), *([of_environment] if of_environment else ())]
    return Keys.of(keys, args.api_key_file)


def admin_keys_of(args: argparse.Namespace) -> Keys | None:
    """Return the admin key of the command line or the environment; None if there is none."""
    from mie.serve.keys import Keys

    key = args.admin_api_key or os.environ.get("MIE_ADMIN_API_KEY")
    return Keys.of_one("admin", key) if key else None


def with_config_file(
    args: argparse.Namespace, parser: argparse.ArgumentParser
) -> argparse.Namespace:
    """Return the arguments with the options of ``--config`` that the command line does not give.

    Raises:
        ConfigError: the file cannot be read, or has an option that is unknown or out of place.
    """
    if args.config is None:
        return args
    from mie.serve.config import arguments_of

    known = {text for action in parser._actions for text in action.option_strings}
    of_file = vars(parser.parse_args(arguments_of(args.config, known)))
    given_here = {name: value for name, value in vars(args).items() if value is not None}
    if "served_model" in given_here:
        of_file["model"] = None
    return argparse.Namespace(**{**of_file, **given_here})


# Replicas.


def serve_on_ray(args: argparse.Namespace, config: ServeConfig, engine: Mapping[str, Any]) -> int:
    """Serve with replicas until a signal, and return the exit code.

    Raises:
        ConfigError: an option is out of range, or the machine is too small.
        MissingExtraError: the extra ``ray`` is not installed.
    """
    if args.trace is not None:
        raise ConfigError("--trace writes the events of one engine (leave out --replicas)")
    if args.replicas is not None and args.autoscaling is not None:
        raise ConfigError("--replicas and --autoscaling are both given; give one of them")
    from dataclasses import replace

    from mie.ray.config import MAX_CHUNKS_PER_SECOND, ReplicaConfig

    if args.max_chunks_per_second is None:
        config = replace(config, max_chunks_per_second=MAX_CHUNKS_PER_SECOND)
    given = {
        "num_replicas": args.replicas,
        "num_cpus": args.replica_cpus,
        "num_gpus": args.replica_gpus,
        "request_router": args.request_router,
        "router_settings": args.router_settings,
        "autoscaling": args.autoscaling,
    }
    given = {name: value for name, value in given.items() if value is not None}
    replicas = ReplicaConfig(engine=engine, server=config, **given)
    with needing_extra("ray", "mie serve --replicas"):
        from mie.ray.app import serve_replicas
    return serve_replicas(replicas, args.ray_address)
