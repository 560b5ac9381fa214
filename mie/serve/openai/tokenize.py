"""Text to tokens and back, and conversations to prompts."""

from typing import Annotated, Any

from starlette.requests import Request
from starlette.responses import Response

from mie.base.threads import call_in_thread
from mie.serve.body import ABSENT, OFF, SOME, TEXT, AtMost, Items, all_of, any_of
from mie.serve.errors import invalid, unsupported
from mie.serve.openai.chat import chat_prompt
from mie.serve.openai.protocol import Messages, OtherFields, TemplateFields, TokenId
from mie.serve.serving import Asked, Serving
from mie.serve.writer import json_response


class TemplateRequest(TemplateFields, OtherFields):
    """The body of ``POST /apply-template``."""

    model: str | None = None


class TokenizeRequest(TemplateRequest):
    """The body of ``POST /tokenize``: a text or messages."""

    model_config = all_of(
        any_of(
            {"prompt": TEXT, "messages": ABSENT},
            {"messages": SOME, "prompt": ABSENT, "add_special_tokens": OFF},
        )
    )

    messages: Messages | None = None  # type: ignore[assignment]
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


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
    return json_response({"prompt": text}, asked.headers)


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
    if (body.prompt is None) == (body.messages is None):
        got = "neither" if body.prompt is None else "both"
        raise invalid(f"the body needs one of prompt and messages; got {got}", "prompt")
    if body.messages is not None:
        if body.add_special_tokens:
            raise unsupported("add_special_tokens", "the chat template writes them")
        tokens: list[int] = (await chat_prompt(body, serving))["prompt_token_ids"]
        return tokens
    assert body.prompt is not None
    adds = body.add_special_tokens is not False
    return await serving.encode(body.prompt, add_special_tokens=adds)
