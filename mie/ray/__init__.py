"""Beyond one process: the server's application in replicas of Ray Serve, and batches on Ray Data.

Only this room uses Ray. Ray comes with the extra ``ray`` and is imported when a name
of this module is used.
"""

from typing import TYPE_CHECKING

from mie.errors import needing_extra

if TYPE_CHECKING:
    from mie.ray.app import build_openai_app as build_openai_app
    from mie.ray.config import ReplicaConfig as ReplicaConfig
    from mie.ray.data import generate as generate

__all__ = ["ReplicaConfig", "build_openai_app", "generate"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'mie.ray' has no attribute {name!r}")
    with needing_extra("ray", "mie.ray"):
        from mie.ray import app, config, data
    homes = {"ReplicaConfig": config, "build_openai_app": app, "generate": data}
    return getattr(homes[name], name)
