"""Beyond one process: the server's application in replicas of Ray Serve, and batches on Ray Data.

This room knows Ray, and no other does. Its packages come with the extra ``ray``, so it is imported
when it is used.
"""

from mie.errors import MissingExtraError

try:
    from mie.ray.app import build_openai_app as build_openai_app
    from mie.ray.config import ReplicaConfig as ReplicaConfig
    from mie.ray.data import generate as generate
except ImportError as error:
    raise MissingExtraError(
        f"mie.ray needs the package {error.name} (install it with: pip install 'mie[ray]')"
    ) from error
