"""Text to tokens and back, and conversations to prompts.

The bodies are vLLM's (``prompt``, ``messages``, ``tokens``) or llama.cpp's (``content``), and the
answers have the keys of both.
"""

from typing import Annotated, Any

from starlette.requests import Request
from starlette.responses import Response

from mie.serve.body import ABSENT, OFF, SOME, TEXT, AtMost, Items, all_of, any_of
from mie.serve.errors import invalid, unsupported
from mie.serve.fields import Unsupported
from mie.serve.openai.chat import chat_prompt
from mie.serve.openai.protocol import Messages, OtherFields, TemplateFields, TokenId
from mie.serve.serving import Asked, Serving
from mie.serve.writer import json_response
from mie.system.threads import call_in_thread
from mie.text.token_bytes import TokenBytes

_PARSED = "special tokens in a text are always parsed"


class TemplateRequest(TemplateFields, OtherFields):
    """The body of ``POST /apply-template``."""

    model: str | None = None


class TokenizeRequest(TemplateRequest):
    """The body of ``POST /tokenize``: a text under one of two names, or messages."""

    model_config = all_of(
        any_of(
            {"prompt": TEXT, "content": ABSENT, "messages": ABSENT},
            {"content": TEXT, "prompt": ABSENT, "messages": ABSENT},
            {
                "messages": SOME,
                "prompt": ABSENT,
                "content": ABSENT,
                "add_special_tokens": OFF,
                "add_special": OFF,
            },
        )
    )

    messages: Messages | None = None  # type: ignore[assignment]
    prompt: str | None = None
    content: str | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    parse_special: Annotated[Any, Unsupported(_PARSED, (True,))] = None
    return_token_strs: bool | None = None
    with_pieces: bool | None = None


class DetokenizeRequest(OtherFields):
    """The body of ``POST /detokenize``."""

    model: str | None = None
    tokens: Annotated[Items[TokenId], AtMost("prompt")]


async def tokenize(asked: Asked[TokenizeRequest]) -> Response:
    """Return the tokens of a text or of a conversation."""
    body, serving = asked.body, asked.serving
    tokenizer = serving.required_tokenizer()
    tokens = await _tokens(body, serving)
    answer: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": serving.facts.max_model_len,
        "tokens": tokens,
        "token_strs": tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None,
    }
    if body.with_pieces:
        spell = TokenBytes(tokenizer.tokenizer)
        answer["tokens"] = [{"id": each, "piece": _piece(spell(each))} for each in tokens]
    return json_response(answer, asked.headers)


async def detokenize(asked: Asked[DetokenizeRequest]) -> Response:
    """Return the text of tokens, special ones included."""
    body, serving = asked.body, asked.serving
    tokenizer, vocab_size = serving.required_tokenizer(), serving.facts.vocab_size
    highest = max(body.tokens, default=0)
    if highest >= vocab_size:
        message = f"tokens has id {highest}; the vocabulary has ids 0 … {vocab_size - 1}"
        raise invalid(message, "tokens")
    text = await call_in_thread(tokenizer.decode, body.tokens)
    return json_response({"prompt": text, "content": text}, asked.headers)


async def tokenizer_info(request: Request) -> Response:
    """Describe the tokenizer."""
    serving: Serving = request.app.state.serving
    tokenizer = serving.required_tokenizer()
    return json_response(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "vocab_size": len(tokenizer),
            "model_max_length": serving.facts.max_model_len,
            "bos_token": tokenizer.bos_token,
            "eos_token": tokenizer.eos_token,
            "pad_token": tokenizer.pad_token,
            "unk_token": tokenizer.unk_token,
            "special_tokens": tokenizer.all_special_tokens,
            "chat_template": tokenizer.chat_template,
        }
    )


async def apply_template(asked: Asked[TemplateRequest]) -> Response:
    """Return a conversation as the prompt that the model gets."""
    prompt = await chat_prompt(asked.body, asked.serving)
    return json_response({"prompt": prompt["prompt"]}, asked.headers)


async def _tokens(body: TokenizeRequest, serving: Serving) -> list[int]:
    given = [n for n in ("prompt", "content", "messages") if getattr(body, n) is not None]
    if len(given) != 1:
        got = " and ".join(given) or "none of them"
        raise invalid(f"the body needs one of prompt, content and messages; got {got}", "prompt")
    if body.messages is not None:
        if body.add_special_tokens or body.add_special:
            raise unsupported("add_special_tokens", "the chat template writes them")
        tokens: list[int] = (await chat_prompt(body, serving))["prompt_token_ids"]
        return tokens
    text, adds = (
        (body.content, bool(body.add_special))
        if body.prompt is None
        else (body.prompt, body.add_special_tokens is not False)
    )
    assert text is not None
    return await serving.encode(text, add_special_tokens=adds)


def _piece(data: bytes) -> str | list[int]:
    """Return a token's text, or its bytes where they are no text by themselves, as llama.cpp."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)
