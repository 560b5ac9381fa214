"""Offer the tokenizer with the names, defaults and meanings of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, overload

from mie.errors import ConfigError, RequestError
from mie.text.chat import ChatTemplates
from mie.text.library import library_errors
from mie.text.messages import REASONING, Message, checked_messages, is_batch
from mie.text.template_files import TemplateFiles
from mie.text.tokenizer import Tokenizer

_NO_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "padding": (False, None, "do_not_pad"),
    "truncation": (False, None, "do_not_truncate"),
    "max_length": (None,),
    "return_tensors": (None,),
    "text_pair": (None,),
    "return_attention_mask": (True, None),
    "return_token_type_ids": (False, None),
    "return_assistant_tokens_mask": (False,),
    "tokenizer_kwargs": (None, {}),
    "clean_up_tokenization_spaces": (False, None),
}


class BatchEncoding(dict[str, Any]):
    """Token ids and attention mask of one text or several; keys are also attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"BatchEncoding has no {name!r}; it has {[*self]}") from None


class _Special:
    """The text or the id of a special token, or None if the tokenizer has none of that name."""

    def __init__(self, name: str, *, is_id: bool = False) -> None:
        self._name, self._is_id = name, is_id

    def __get__(self, owner: PretrainedTokenizer | None, kind: type | None = None) -> Any:
        token = None if owner is None else owner.tokenizer.special_tokens.get(self._name)
        if owner is None or token is None:
            return None
        return owner.tokenizer.token_to_id(token) if self._is_id else token


class PretrainedTokenizer:
    """The tokenizer that `LLM.get_tokenizer` returns.

    It has the commonly used methods of transformers' fast tokenizers, and refuses parameters that
    it would have to ignore. `tokenizer` is mie's own. This class wraps it.
    """

    def __init__(self, tokenizer: Tokenizer, files: TemplateFiles) -> None:
        self.tokenizer = tokenizer
        self._files = files

    def __repr__(self) -> str:
        special = self.tokenizer.special_tokens
        return f"{type(self).__name__}(vocab_size={self.vocab_size}, special_tokens={special})"

    # Encoding and decoding

    def __call__(
        self, text: str | Sequence[str], add_special_tokens: bool = True, **options: Any
    ) -> BatchEncoding:
        """Return ``input_ids`` and ``attention_mask`` of a text, or lists of both for several
        texts."""
        _refuse("__call__", options)
        if isinstance(text, str):
            return _encoding(self.encode(text, add_special_tokens))
        if not isinstance(text, Sequence):
            raise RequestError(f"text must be a string or a list of strings, got {text!r}")
        each = [_encoding(self.encode(one, add_special_tokens)) for one in text]
        return BatchEncoding(
            {key: [one[key] for one in each] for key in ("input_ids", "attention_mask")}
        )

    def encode(self, text: str, add_special_tokens: bool = True, **options: Any) -> list[int]:
        """Return the token ids of ``text``."""
        _refuse("encode", options)
        return self.tokenizer.encode(text, add_special_tokens)

    @overload
    def decode(
        self, token_ids: int | Sequence[int], skip_special_tokens: bool = ..., **options: Any
    ) -> str: ...

    @overload
    def decode(
        self, token_ids: Sequence[Sequence[int]], skip_special_tokens: bool = ..., **options: Any
    ) -> list[str]: ...

    def decode(
        self,
        token_ids: int | Sequence[int] | Sequence[Sequence[int]],
        skip_special_tokens: bool = False,
        **options: Any,
    ) -> str | list[str]:
        """Return the text of token ids, or a list of texts for a list of lists.

        Special tokens are included unless ``skip_special_tokens`` is set.
        """
        _refuse("decode", options)
        ids = _as_list(token_ids)
        if ids and not _is_id(ids[0]):
            return [self.tokenizer.decode(_as_list(each), skip_special_tokens) for each in ids]
        return self.tokenizer.decode(ids, skip_special_tokens)

    def batch_decode(
        self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = False, **options: Any
    ) -> list[str]:
        """Return the texts of several lists of token ids."""
        return [self.decode(each, skip_special_tokens, **options) for each in _as_list(sequences)]

    def convert_ids_to_tokens(
        self, ids: int | Sequence[int], skip_special_tokens: bool = False
    ) -> Any:
        """Return the vocabulary's spelling of an id, or of each in a list; None for unknown ids."""
        if _is_id(ids):
            return self._token(ids)
        skipped = self.tokenizer.special_ids if skip_special_tokens else frozenset()
        return [self._token(each) for each in _as_list(ids) if each not in skipped]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Return the id of a token or of each in a list.

        An unknown token has the id of ``unk_token``, or None if there is no such token.
        """
        if isinstance(tokens, str):
            token_id = self.tokenizer.token_to_id(tokens)
            return self.unk_token_id if token_id is None else token_id
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        """Return the text of tokens that are spelled as in the vocabulary."""
        return self.tokenizer.join(list(tokens))

    # The vocabulary

    @property
    def vocab_size(self) -> int:
        """Number of tokens without added tokens."""
        return self.tokenizer.num_tokens(with_added_tokens=False)

    def __len__(self) -> int:
        """Return the number of tokens, including added tokens."""
        return self.tokenizer.num_tokens(with_added_tokens=True)

    def get_vocab(self) -> dict[str, int]:
        """Return the id of every token."""
        return self.tokenizer.vocabulary()

    # Special tokens

    @cached_property
    def all_special_tokens(self) -> list[str]:
        """The text of every special token that the configuration names."""
        config = self.tokenizer.config
        named = [*config.special_tokens.values(), *config.more_special_tokens]
        return list(dict.fromkeys(named))

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of `all_special_tokens`."""
        return [self.convert_tokens_to_ids(token) for token in self.all_special_tokens]

    bos_token: str | None = _Special("bos_token")  # type: ignore[assignment]
    """The token that begins a text."""
    eos_token: str | None = _Special("eos_token")  # type: ignore[assignment]
    """The token that ends a text."""
    pad_token: str | None = _Special("pad_token")  # type: ignore[assignment]
    """The padding token. mie does not use it."""
    unk_token: str | None = _Special("unk_token")  # type: ignore[assignment]
    """The token for text that the vocabulary cannot spell."""
    bos_token_id: int | None = _Special("bos_token", is_id=True)  # type: ignore[assignment]
    eos_token_id: int | None = _Special("eos_token", is_id=True)  # type: ignore[assignment]
    pad_token_id: int | None = _Special("pad_token", is_id=True)  # type: ignore[assignment]
    unk_token_id: int | None = _Special("unk_token", is_id=True)  # type: ignore[assignment]

    # Chat

    @cached_property
    def chat_templates(self) -> ChatTemplates:
        """The model's chat templates, as `LLM.chat` uses them."""
        return ChatTemplates(self._files)

    @cached_property
    def chat_template(self) -> str | dict[str, str] | None:
        """The text of the chat template, texts by name if there are several, or None."""
        templates = {name: self._files.read(name)[0] for name in self._files.names}
        if not templates:
            return None
        return templates["default"] if [*templates] == ["default"] else templates

    def apply_chat_template(
        self,
        conversation: Sequence[Message] | Sequence[Sequence[Message]],
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        **options: Any,
    ) -> Any:
        """Render the conversation, or each of several, with the chat template.

        With ``tokenize`` it returns a mapping with ``input_ids`` and ``attention_mask``, or a list
        of ids if ``return_dict`` is false. Without ``tokenize`` it returns text. Other names are
        variables of the template. Messages are passed to the template unchanged, except that keys
        with the value None are dropped, and that reasoning is ``reasoning_content`` and
        ``thinking`` under any name.
        """
        settings = {name: options.pop(name) for name in [*options] if name in _NO_EFFECT}
        _refuse("apply_chat_template", settings)
        template = self.chat_templates.choose(chat_template, tools)

        def text_of(messages: Any) -> str:
            return template.render(
                [_as_in_transformers(message) for message in checked_messages(messages)],
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                documents=documents,
                **options,
            )

        if not conversation or not is_batch(conversation):
            return self._as_asked(text_of(conversation), tokenize, return_dict)
        texts = [text_of(each) for each in conversation]
        return self._as_asked(texts, tokenize, return_dict)

    def _as_asked(self, text: str | list[str], tokenize: bool, return_dict: bool) -> Any:
        if not tokenize:
            return text
        encoding = self(text, add_special_tokens=False)
        return encoding if return_dict else encoding["input_ids"]

    def _token(self, token_id: Any) -> str | None:
        with library_errors(RequestError, f"{token_id!r} is not a token id"):
            return self.tokenizer.id_to_token(int(token_id))


def _encoding(token_ids: list[int]) -> BatchEncoding:
    return BatchEncoding({"input_ids": token_ids, "attention_mask": [1] * len(token_ids)})


def _as_in_transformers(message: Message) -> dict[str, Any]:
    """Return a message without None, and with reasoning under both names of transformers."""
    kept = {key: value for key, value in message.items() if value is not None}
    reasoning = [kept[key] for key in REASONING if key in kept]
    if not reasoning:
        return kept
    return {"thinking": reasoning[0], **kept, "reasoning_content": reasoning[0]}


def _is_id(value: Any) -> bool:
    return hasattr(value, "__index__")


def _as_list(values: Any) -> list[Any]:
    """Return ``values`` (one id, a sequence or an array) as a list."""
    if _is_id(values) and not hasattr(values, "__len__"):
        return [int(values)]
    return list(values.tolist() if hasattr(values, "tolist") else values)


def _refuse(method: str, options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for an option that would have an effect."""
    for name, value in options.items():
        if name not in _NO_EFFECT:
            raise ConfigError(f"{method} has no parameter {name!r}")
        if value not in _NO_EFFECT[name]:
            raise ConfigError(
                f"{method}: {name}={value!r} is not supported; leave it at {_NO_EFFECT[name][0]!r}"
            )
