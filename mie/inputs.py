"""Offer the kinds of prompts under the module name that vLLM has."""

from mie.frontend.prompts import PromptType, SingletonPrompt, TextPrompt, TokensPrompt
from mie.refusals import missing

__all__ = ["PromptType", "SingletonPrompt", "TextPrompt", "TokensPrompt"]


def __getattr__(name: str) -> object:
    raise missing("vllm.inputs", name)
