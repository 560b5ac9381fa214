"""Explain in one line why the Hugging Face hub refuses a model, and name the remedy."""

import os
from collections.abc import Iterator
from urllib.parse import urlsplit

from mie.errors import ModelError, printable

_PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HTTP_PROXY", "http_proxy")

_REASONS = {
    "GatedRepoError": (
        "it is gated: accept its licence at {address}, then log in with `hf auth login`, or set "
        "HF_TOKEN"
    ),
    "RepositoryNotFoundError": (
        "there is no such directory, and no such model on the hub (check the spelling at "
        "{address}; for a private one log in with `hf auth login`, or set HF_TOKEN)"
    ),
    "RevisionNotFoundError": "it has no such revision (leave it out, or see {address})",
    "OfflineModeIsEnabled": (
        "HF_HUB_OFFLINE is set, and the model is not on this machine (unset it, or see `mie list`)"
    ),
    "ProxyError": "the proxy {proxy} does not let it through (correct or unset {proxy_name})",
    "timeout": "{host} did not answer in time{through} (try again; {mirror})",
    "connection": (
        "there is no such file or directory, and {host} cannot be reached{through} (check the "
        "name, the network and HTTPS_PROXY; {mirror}; `mie list` shows the models that are on this "
        "machine)"
    ),
    "ENOSPC": "the disk of the cache is full (`mie rm` deletes models; HF_HOME names another disk)",
}
"""Reasons by the class of an error, or by the kind that `_kinds` gives it."""

_MIRROR = "HF_ENDPOINT names a mirror"


def hub_error(error: Exception, name: str) -> ModelError:
    """Return the error for a user who asked for the model ``name``."""
    for kind in _kinds(error):
        if kind in _REASONS:
            return ModelError(f"{name}: {_REASONS[kind].format(**_facts(name))}")
    lines = printable(str(error)).strip().splitlines() or [""]
    status = getattr(getattr(error, "response", None), "status_code", None)
    answered = f"{_facts(name)['host']} answered with status {status}: " if status else ""
    return ModelError(
        f"{name}: the Hugging Face hub did not give it: {answered}{type(error).__name__}: "
        f"{lines[0]}"
    )


def _kinds(error: BaseException | None) -> Iterator[str]:
    """Yield the kinds of an error and of its causes.

    ``huggingface_hub`` has had two HTTP libraries. Their errors have different names and bases.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        names = [cls.__name__ for cls in type(error).__mro__]
        yield from names
        if any("Timeout" in each for each in names):
            yield "timeout"
        if {"ConnectError", "ConnectionError", "NetworkError", "RemoteProtocolError"} & {*names}:
            yield "connection"
        if getattr(error, "errno", None) == 28:
            yield "ENOSPC"
        error = error.__cause__ or error.__context__


def _facts(name: str) -> dict[str, str]:
    from huggingface_hub import constants

    proxy_name = next((each for each in _PROXIES if os.environ.get(each)), "HTTPS_PROXY")
    proxy = urlsplit(os.environ.get(proxy_name, "")).hostname or ""
    is_mirror = "HF_ENDPOINT" in os.environ
    return {
        "address": f"{constants.ENDPOINT}/{name}",
        "host": constants.ENDPOINT,
        "mirror": "HF_ENDPOINT chose it" if is_mirror else _MIRROR,
        "proxy": proxy,
        "proxy_name": proxy_name,
        "through": f" through the proxy {proxy}" if proxy else "",
    }
