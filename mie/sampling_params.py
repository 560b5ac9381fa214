"""Offer the parameters under the module name that vLLM has."""

from mie.params.beam_search import BeamSearchParams
from mie.params.sampling import RequestOutputKind, SamplingParams
from mie.params.structured import StructuredOutputsParams
from mie.refusals import missing

__all__ = ["BeamSearchParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]


def __getattr__(name: str) -> object:
    raise missing("vllm.sampling_params", name)
