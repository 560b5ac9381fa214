"""Define the kinds of prompts, with vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypedDict


class _Options(TypedDict, total=False):
    cache_salt: str | None


class TextPrompt(_Options):
    """A prompt that is text.

    Only prompts with equal ``cache_salt`` share cached blocks.
    """

    prompt: str


class _Text(_Options, total=False):
    prompt: str | None


class TokensPrompt(_Text):
    """A prompt of token ids. Its ``prompt`` is their text, which outputs return."""

    prompt_token_ids: Sequence[int]


Prompt: TypeAlias = str | Sequence[int] | TextPrompt | TokensPrompt | Mapping[str, Any]
"""A text, token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``.

A mapping may also have a ``"cache_salt"``: only prompts with equal salts share cached blocks. Its
``"answer"`` says how the answer is read (`LLM.chat_prompt`).
"""

PromptType = SingletonPrompt = Prompt
