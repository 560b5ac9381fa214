"""Serve with engines on Ray: their number, their place and their resources."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mie.errors import ConfigError

if TYPE_CHECKING:
    from mie.serve.config import ServeConfig


def is_on_ray(args: argparse.Namespace) -> bool:
    """Return whether any option asks for Ray."""
    asked = (args.replicas, args.ray_address, args.autoscaling)
    return any(each is not None for each in asked)


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

    from mie.ray import missing
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
    try:
        from mie.ray.server import serve_replicas
    except ImportError as error:
        raise missing(error) from error
    return serve_replicas(replicas, args.ray_address)
