"""Offer log-probabilities under the module name that vLLM has."""

from mie.frontend.outputs import Logprob
from mie.refusals import missing

__all__ = ["Logprob"]


def __getattr__(name: str) -> object:
    raise missing("vllm.logprobs", name)
