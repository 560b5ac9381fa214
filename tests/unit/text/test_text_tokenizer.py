"""Test Tokenizer: loading, special tokens, and broken files."""

import json
from pathlib import Path
from typing import Any

import pytest
from audit import backend_of
from small_tokenizers import KINDS, SENTENCES
from tokenizers import Tokenizer as Backend

from mie.errors import RequestError, TokenizerError
from mie.text.tokenizer import Tokenizer


def save(directory: Path, kind: str = "byte_level", **config: Any) -> Backend:
    backend = backend_of(KINDS[kind]())
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return backend


def test_special_tokens_are_read_as_strings_or_as_serialised_tokens(tmp_path: Path) -> None:
    backend = save(tmp_path, bos_token={"content": "<|bos|>"}, eos_token="<|end|>", pad_token=None)
    tokenizer = Tokenizer.load(tmp_path, None)
    assert tokenizer.bos_token_id == backend.token_to_id("<|bos|>")
    assert tokenizer.eos_token_id == backend.token_to_id("<|end|>")
    assert tokenizer.special_tokens == {"bos_token": "<|bos|>", "eos_token": "<|end|>"}
    assert tokenizer.special_ids == {tokenizer.bos_token_id, tokenizer.eos_token_id}


def test_the_post_processor_decides_about_bos(tmp_path: Path) -> None:
    save(tmp_path, "llama2", bos_token="<s>", eos_token="</s>", add_bos_token=True)
    tokenizer = Tokenizer.load(tmp_path, None)
    ids = tokenizer.encode("the sea")
    assert ids.count(1) == 1  # not a second one from add_bos_token
    assert tokenizer.encode("the sea", add_special_tokens=False) == ids[1:]


def test_add_bos_token_counts_where_the_post_processor_adds_none(tmp_path: Path) -> None:
    save(tmp_path, bos_token="<|bos|>", eos_token="<|end|>", add_bos_token=True, add_eos_token=True)
    tokenizer = Tokenizer.load(tmp_path, None)
    plain = tokenizer.encode("the sea", add_special_tokens=False)
    assert tokenizer.encode("the sea") == [tokenizer.bos_token_id, *plain, tokenizer.eos_token_id]


def test_truncation_and_padding_in_the_file_do_not_touch_prompts(tmp_path: Path) -> None:
    backend = Backend.from_str(backend_of(KINDS["byte_level"]()).to_str())
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path, None)
    assert tokenizer.decode(tokenizer.encode(SENTENCES[0])) == SENTENCES[0]


def test_a_larger_model_vocabulary_is_fine_and_a_smaller_one_is_not(tmp_path: Path) -> None:
    backend = save(tmp_path)
    size = max(backend.get_vocab().values()) + 1
    assert Tokenizer.load(tmp_path, size).vocab_size == size
    assert Tokenizer.load(tmp_path, size + 64).vocab_size == size
    with pytest.raises(TokenizerError, match=rf"token id {size - 1},.* vocab_size is {size - 1}"):
        Tokenizer.load(tmp_path, size - 1)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json in .*Hugging Face format"):
        Tokenizer.load(tmp_path, None)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(TokenizerError, match=r"tokenizer\.model alone is not supported"):
        Tokenizer.load(tmp_path, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "tokenizer_config.json is not valid JSON"),
        ("[1]", "tokenizer_config.json must contain a JSON object, got a list"),
        ("[" * 100_000, "tokenizer_config.json is not valid JSON"),
        ('{"eos_token": 5}', "eos_token must be a string, got 5"),
        ('{"eos_token": "<nope>"}', "eos_token in .* is '<nope>', which .* does not have"),
        ('{"add_bos_token": true}', "sets add_bos_token but names no bos_token"),
        ('{"add_eos_token": 1}', "sets add_eos_token but names no eos_token"),
        ('{"add_bos_token": 2}', "add_bos_token must be a boolean, got 2"),
        ('{"add_eos_token": "yes"}', "add_eos_token must be a boolean, got 'yes'"),
    ],
)
def test_a_broken_tokenizer_config_is_named(tmp_path: Path, text: str, message: str) -> None:
    save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.load(tmp_path, None)


def test_an_unpaired_surrogate_is_refused_with_its_position() -> None:
    with pytest.raises(RequestError, match=r"U\+D83D, at character 2"):
        KINDS["byte_level"]().encode("hi\ud83d")
