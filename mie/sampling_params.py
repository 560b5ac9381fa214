"""Offer the parameters under the module name that vLLM has."""

from mie.base.refusals import missing
from mie.config.params.sampling import BeamSearchParams, RequestOutputKind, SamplingParams
from mie.config.params.structured import StructuredOutputsParams

__all__ = ["BeamSearchParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]


def __getattr__(name: str) -> object:
    raise missing("vllm.sampling_params", name)
