"""Define the options of engines on Ray: their number, their place and their resources."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mie.config.arguments import json_object
from mie.errors import ConfigError

if TYPE_CHECKING:
    from mie.serve.config import ServeConfig

_WHEN = (
    "Several engines on Ray (pip install 'mie[ray]'). They pay when each has a GPU or a machine of"
    " its own. Two replicas on one CPU buy nothing: one engine with a larger --max-num-seqs reads"
    " the weights once for all."
)


def add_ray_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the options that ``mie serve`` and ``mie batch`` share."""
    group = parser.add_argument_group("replicas", _WHEN)
    group.add_argument("--replicas", type=int, metavar="N", help="number of engines on Ray")
    group.add_argument(
        "--ray-address",
        metavar="ADDRESS",
        help="cluster to run on; 'auto' is the one of this machine (default: a new one, here)",
    )
    group.add_argument(
        "--replica-cpus",
        type=float,
        metavar="X",
        help="CPUs of each replica, which are also its threads (default: 1)",
    )
    group.add_argument(
        "--replica-gpus", type=float, metavar="X", help="GPUs of each replica (default: 0)"
    )
    return group


def add_serving_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``mie serve``: also routing and autoscaling."""
    group = add_ray_options(parser)
    group.add_argument(
        "--request-router",
        metavar="NAME",
        help="prefix (equal beginnings go to one replica), random, ray-pow2, ray-prefix, or the"
        " import path of a request router of Ray Serve (default: prefix)",
    )
    group.add_argument(
        "--router-settings",
        type=json_object,
        metavar="JSON",
        help='arguments of the router, such as {"prefix_bytes": 4096, "slack": 8}',
    )
    group.add_argument(
        "--autoscaling",
        type=json_object,
        metavar="JSON",
        help="Ray Serve's autoscaling_config, in place of --replicas, such as"
        ' {"min_replicas": 1, "max_replicas": 8}',
    )


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
