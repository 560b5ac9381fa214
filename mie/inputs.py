"""Offer the kinds of prompts under the module name that vLLM has."""

from mie.base.refusals import missing
from mie.frontend.outputs import PromptType, SingletonPrompt, TextPrompt, TokensPrompt

__all__ = ["PromptType", "SingletonPrompt", "TextPrompt", "TokensPrompt"]


def __getattr__(name: str) -> object:
    raise missing("vllm.inputs", name)
