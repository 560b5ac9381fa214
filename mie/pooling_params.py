"""Refuse the names of vLLM's module of parameters for embedding models."""

from mie.base.refusals import missing


def __getattr__(name: str) -> object:
    raise missing("vllm.pooling_params", name)
