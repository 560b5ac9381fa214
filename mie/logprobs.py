"""Offer log-probabilities under the module name that vLLM has."""

from mie.base.refusals import missing
from mie.frontend.outputs import Logprob

__all__ = ["Logprob"]


def __getattr__(name: str) -> object:
    raise missing("vllm.logprobs", name)
