"""Offer the outputs under the module name that vLLM has."""

from mie.base.refusals import missing
from mie.frontend.outputs import CompletionOutput, RequestOutput

__all__ = ["CompletionOutput", "RequestOutput"]


def __getattr__(name: str) -> object:
    raise missing("vllm.outputs", name)
