"""Compare `PretrainedTokenizer` with transformers 5.23, which gave the expected values."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import mie
from mie.errors import ConfigError, RequestError
from mie.text.pretrained import PretrainedTokenizer
from mie.text.template_files import TemplateFiles
from mie.text.tokenizer import Tokenizer

BUNDLED = Path(mie.__file__).parent / "assets" / "tiny"
TEXT = "Mia found a kite."
IDS = [0, 49, 77, 69, 580, 263, 811, 18]
TOKENS = ["M", "i", "a", "Ġfound", "Ġa", "Ġkite", "."]
CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi there "},
]
CHAT_IDS = [0, 2, 38, 73, 640, 18, 3, 44, 351, 83]


def load(directory: Path) -> PretrainedTokenizer:
    files = TemplateFiles(directory)
    return PretrainedTokenizer(Tokenizer.load(directory, None), files)


@pytest.fixture(scope="module")
def bundled() -> Iterator[PretrainedTokenizer]:
    tokenizer = load(BUNDLED)
    yield tokenizer
    tokenizer.chat_templates.close()


def test_a_call_returns_ids_and_mask(bundled: PretrainedTokenizer) -> None:
    encoding = bundled(TEXT)
    assert dict(encoding) == {"input_ids": IDS, "attention_mask": [1] * 8}
    assert encoding.input_ids == encoding["input_ids"]
    assert dict(bundled([TEXT, "M"], add_special_tokens=False)) == {
        "input_ids": [IDS[1:], [49]],
        "attention_mask": [[1] * 7, [1]],
    }
    with pytest.raises(AttributeError, match=r"it has .'input_ids'"):
        encoding.pixel_values  # noqa: B018  # reading it is the test


def test_encode_and_decode(bundled: PretrainedTokenizer) -> None:
    assert bundled.encode(TEXT) == IDS
    assert bundled.encode(TEXT, add_special_tokens=False) == IDS[1:]
    assert bundled.decode(IDS) == "<|bos|>" + TEXT
    assert bundled.decode(np.array(IDS), skip_special_tokens=True) == TEXT
    assert bundled.decode(49) == bundled.decode(np.int64(49)) == "M"
    assert bundled.decode([[49, 77], [69]]) == ["Mi", "a"]
    assert bundled.batch_decode([[0, 49], [69]], skip_special_tokens=True) == ["M", "a"]
    assert bundled.decode([]) == ""
    assert bundled.decode([10**6]) == ""


def test_tokens(bundled: PretrainedTokenizer) -> None:
    assert bundled.convert_ids_to_tokens(IDS) == ["<|bos|>", *TOKENS]
    assert bundled.convert_ids_to_tokens(IDS, skip_special_tokens=True) == TOKENS
    assert bundled.convert_ids_to_tokens(49) == "M"
    assert bundled.convert_ids_to_tokens(10**6) is None
    assert bundled.convert_tokens_to_ids(["<|bos|>", *TOKENS]) == IDS
    assert bundled.convert_tokens_to_ids("no such token") is None
    assert bundled.convert_tokens_to_string(TOKENS) == TEXT
    with pytest.raises(RequestError, match="-1 is not a token id"):
        bundled.convert_ids_to_tokens(-1)


def test_the_vocabulary_and_the_special_tokens(bundled: PretrainedTokenizer) -> None:
    assert (len(bundled), bundled.vocab_size) == (2048, 2048)
    assert bundled.get_vocab()["Ġkite"] == 811
    assert bundled.all_special_tokens == [
        "<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>",
    ]  # fmt: skip
    assert bundled.all_special_ids == [0, 1, 2, 3, 4]
    assert (bundled.bos_token, bundled.bos_token_id) == ("<|bos|>", 0)
    assert (bundled.eos_token, bundled.eos_token_id) == ("<|eos|>", 1)
    assert (bundled.pad_token, bundled.pad_token_id) == (None, None)
    assert (bundled.unk_token, bundled.unk_token_id) == (None, None)
    assert bundled.chat_template == (BUNDLED / "chat_template.jinja").read_text()
    assert repr(bundled).startswith("PretrainedTokenizer(vocab_size=2048, special_tokens={'bos_to")


def test_the_facade_has_the_common_names_only(bundled: PretrainedTokenizer) -> None:
    """A name of transformers that a script uses is a reason to add it here."""
    special = {f"{name}_token{end}" for name in ("bos", "eos", "pad", "unk") for end in ("", "_id")}
    assert {name for name in dir(bundled) if not name.startswith("_")} == {
        *("encode", "decode", "batch_decode", "apply_chat_template", "chat_template"),
        *("convert_ids_to_tokens", "convert_tokens_to_ids", "convert_tokens_to_string"),
        *("vocab_size", "get_vocab", "all_special_tokens", "all_special_ids", *special),
        *("tokenizer", "chat_templates"),  # mie's own
    }


def test_apply_chat_template(bundled: PretrainedTokenizer) -> None:
    apply = bundled.apply_chat_template
    whole = "<|bos|><|system|>Be kind.<|user|>Hello<|assistant|>Hi there<|eos|>"
    assert apply(CHAT, tokenize=False) == whole
    assert apply(CHAT[:2], tokenize=False, add_generation_prompt=True) == (
        "<|bos|><|system|>Be kind.<|user|>Hello<|assistant|>"
    )
    assert dict(apply(CHAT[:2])) == {"input_ids": CHAT_IDS, "attention_mask": [1] * 10}
    assert apply(CHAT[:2], return_dict=False) == CHAT_IDS
    assert apply([CHAT, CHAT[:2]], tokenize=False)[0] == whole
    assert apply([CHAT[:2], CHAT[:2]]).input_ids == [CHAT_IDS, CHAT_IDS]
    assert apply(CHAT, tokenize=False, continue_final_message=True) == whole[: -len("<|eos|>")]
    continued = [*CHAT_IDS, 4, 44, 77, 537]
    assert apply(CHAT, return_dict=False, continue_final_message=True) == continued
    own = "{% for m in messages %}{{ m.content is defined }}{{ x }}{{ tools }}{% endfor %}"
    message = {"role": "user", "content": None}
    assert apply([message], chat_template=own, tokenize=False, x=3, tools=[1]) == "False3[1]"
    shows = "{{ messages[0].thinking }}{{ messages[0].reasoning_content }}"
    for name in ("reasoning_content", "thinking", "reasoning"):  # as transformers 5.24
        message = {"role": "assistant", "content": "x", name: "T"}
        assert apply([message], chat_template=shows, tokenize=False) == "TT"
    with pytest.raises(RequestError, match="messages is empty"):
        apply([])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t(TEXT, padding=True), "padding=True is not supported"),
        (lambda t: t(TEXT, return_tensors="pt"), "return_tensors='pt' is not supported"),
        (lambda t: t.encode(TEXT, truncation=True), "truncation=True is not supported"),
        (lambda t: t.encode(TEXT, nonsense=1), "encode has no parameter 'nonsense'"),
        (lambda t: t.apply_chat_template(CHAT, max_length=3), "max_length=3 is not supported"),
        (lambda t: t.decode([1], clean_up_tokenization_spaces=True), "is not supported"),
    ],
)
def test_options_that_would_be_ignored_are_refused(bundled, call, message) -> None:
    with pytest.raises(ConfigError, match=message):
        call(bundled)
    bundled(TEXT, padding=False, truncation=None, return_tensors=None)
