"""A miniature LLM inference engine. Every number can be checked.

    from mie import LLM, SamplingParams

Names are loaded when they are first used, so that ``import mie`` costs nothing.
"""

import importlib
from typing import TYPE_CHECKING

from mie.base.absent import refuse_modules_of_vllm as _refuse_modules_of_vllm
from mie.base.logs import set_up_logging as _set_up_logging
from mie.base.version import __version__ as __version__
from mie.base.version import __version_tuple__ as __version_tuple__

if TYPE_CHECKING:
    from mie.config.adapters import LoRARequest as LoRARequest
    from mie.config.engine import EngineConfig as EngineConfig
    from mie.config.engine import RequestLimits as RequestLimits
    from mie.config.engine_args import AsyncEngineArgs as AsyncEngineArgs
    from mie.config.engine_args import EngineArgs as EngineArgs
    from mie.config.params.sampling import BeamSearchParams as BeamSearchParams
    from mie.config.params.sampling import RequestOutputKind as RequestOutputKind
    from mie.config.params.sampling import SamplingParams as SamplingParams
    from mie.config.params.structured import StructuredOutputsParams as StructuredOutputsParams
    from mie.engine.engine import Engine as Engine
    from mie.errors import MieError as MieError
    from mie.frontend.async_llm import AsyncLLM as AsyncLLM
    from mie.frontend.async_llm import AsyncLLMEngine as AsyncLLMEngine
    from mie.frontend.beam_search import BeamSearchOutput as BeamSearchOutput
    from mie.frontend.beam_search import BeamSearchSequence as BeamSearchSequence
    from mie.frontend.llm import LLM as LLM
    from mie.frontend.llm_engine import LLMEngine as LLMEngine
    from mie.frontend.outputs import CompletionOutput as CompletionOutput
    from mie.frontend.outputs import Logprob as Logprob
    from mie.frontend.outputs import PromptType as PromptType
    from mie.frontend.outputs import RequestOutput as RequestOutput
    from mie.frontend.outputs import TextPrompt as TextPrompt
    from mie.frontend.outputs import TokensPrompt as TokensPrompt
    from mie.text.tools.definitions import ToolCall as ToolCall

_HOMES = {
    "LLM": "mie.frontend.llm",
    "AsyncLLM": "mie.frontend.async_llm",
    "AsyncLLMEngine": "mie.frontend.async_llm",
    "LLMEngine": "mie.frontend.llm_engine",
    "PromptType": "mie.frontend.outputs",
    "TextPrompt": "mie.frontend.outputs",
    "TokensPrompt": "mie.frontend.outputs",
    "SamplingParams": "mie.config.params.sampling",
    "StructuredOutputsParams": "mie.config.params.structured",
    "RequestOutputKind": "mie.config.params.sampling",
    "BeamSearchOutput": "mie.frontend.beam_search",
    "BeamSearchSequence": "mie.frontend.beam_search",
    "BeamSearchParams": "mie.config.params.sampling",
    "RequestLimits": "mie.config.engine",
    "RequestOutput": "mie.frontend.outputs",
    "CompletionOutput": "mie.frontend.outputs",
    "Logprob": "mie.frontend.outputs",
    "ToolCall": "mie.text.tools.definitions",
    "LoRARequest": "mie.config.adapters",
    "EngineArgs": "mie.config.engine_args",
    "AsyncEngineArgs": "mie.config.engine_args",
    "EngineConfig": "mie.config.engine",
    "Engine": "mie.engine.engine",
    "MieError": "mie.errors",
}

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "Engine",
    "EngineArgs",
    "EngineConfig",
    "LLMEngine",
    "LoRARequest",
    "Logprob",
    "MieError",
    "PromptType",
    "RequestLimits",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "ToolCall",
]

_set_up_logging()
_refuse_modules_of_vllm()


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        from mie.base.refusals import missing

        raise missing(name, __all__)
    try:
        return getattr(importlib.import_module(_HOMES[name]), name)
    except AttributeError as error:
        # Python takes an AttributeError for an absent name, and hides the message.
        reason = f"{type(error).__name__}: {error}"
        raise ImportError(f"mie.{name} cannot be loaded: {reason}") from error


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
