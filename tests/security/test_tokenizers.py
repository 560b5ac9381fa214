"""Check that hostile tokenizers are refused cheaply, at load or at the request."""

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest
from audit import backend_of
from measured import Zygote
from small_tokenizers import KINDS

from mie.errors import RequestError, TokenizerError
from mie.text.detokenizer import Detokenizer
from mie.text.tokenizer import Tokenizer
from mie.text.tokenizer_checks import checked_tokenizer

WORDS = {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"}


def spec(**parts: Any) -> str:
    return json.dumps({"version": "1.0", "added_tokens": [], "model": WORDS, **parts})


def replace(old: str, new: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: old}, "content": new}


def sequence(*steps: Any) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": [*steps]}


def charsmap(trie: bytes, texts: bytes) -> dict[str, Any]:
    data = len(trie).to_bytes(4, "little") + trie + texts
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


def split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def template(*pieces: Any, ids: int = 1) -> dict[str, Any]:
    tokens = {"a": {"id": "a", "ids": [0] * ids, "tokens": ["a"] * ids}}
    pair = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}]
    return {"type": "TemplateProcessing", "single": [*pieces], "pair": pair,
            "special_tokens": tokens}  # fmt: skip


A = {"Sequence": {"id": "A", "type_id": 0}}
SPECIAL = {"SpecialToken": {"id": "a", "type_id": 0}}
DOUBLING = [replace("a", "aa")] * 32
ESCAPED = spec(normalizer=sequence(*DOUBLING)).replace('"normalizer"', '"normalize\\u0072"')
MODEL_FIRST = json.dumps({"model": WORDS, "normalizer": sequence(*DOUBLING)})

AT_LOAD = {
    "doubling 32 times": (spec(normalizer=sequence(*DOUBLING)), "times as long"),
    "doubling in inner sequences": (
        spec(normalizer=sequence(sequence(*DOUBLING[:16]), sequence(*DOUBLING[:16]))),
        "times as long",
    ),
    "doubling after the model": (MODEL_FIRST, "times as long"),
    "a megabyte a character": (spec(normalizer=replace("a", "b" * 10**6)), "times as long"),
    "a megabyte between characters": (spec(normalizer=replace("", "b" * 10**6)), "times as long"),
    "a megabyte for a pattern": (spec(normalizer=replace("x*", "b" * 10**6, "Regex")),
                                 "times as long"),
    "a megabyte in front": (spec(normalizer={"type": "Prepend", "prepend": "b" * 10**6}),
                            "Prepend adds 1000000 characters"),
    "a long text in a charsmap": (spec(normalizer=charsmap(b"\0" * 8, b"b" * 10**5 + b"\0")),
                                  "times as long"),
    "bytes as letters, again and again": (
        spec(pre_tokenizer={"type": "Sequence", "pretokenizers": [
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
             "use_regex": False}] * 32}), "times as long"),
    "doubling while decoding": (
        spec(decoder={"type": "Sequence", "decoders": DOUBLING}), "times as long"),
    "many steps": (spec(normalizer=sequence(*[{"type": "NFD"}] * 100_000)), "100000 steps"),
    "a long part": (spec(normalizer=replace("a", "b" * 3_000_000)), "3000"),
    "the text a thousand times": (spec(post_processor=template(*[A] * 1000)),
                                  "repeats the text 1000 times"),
    "many special tokens": (spec(post_processor=template(A, *[SPECIAL] * 2000)),
                            "adds 2000 tokens"),
    "many ids in one": (spec(post_processor=template(A, SPECIAL, ids=100_000)),
                        "adds 100000 tokens"),
    "a FixedLength of 0": (spec(pre_tokenizer={"type": "FixedLength", "length": 0}),
                           "chunk size must be non-zero"),
    "an empty charsmap": (spec(normalizer={"type": "Precompiled", "precompiled_charsmap": ""}),
                          "charsmap"),
    "a bad charsmap": (spec(normalizer=charsmap(b"\0" * 4, b"")), "index out of bounds"),
    "a charsmap that points outside": (spec(normalizer=charsmap(b"\xff" * 8, b"a\0")),
                                       "index out of bounds"),
    "a repeated repetition": (spec(pre_tokenizer=split("(a+)+$")), "may never end"),
    "a repeated repetition, escaped": (
        spec(pre_tokenizer=split(r"[)](?:\(|[^(]*x{2,})*$")), "may never end"),
    "a repeated repetition in a normalizer": (
        spec(normalizer=replace("((a*)b?)*c", "", "Regex")), "may never end"),
    "a pattern that is none": (spec(pre_tokenizer=split("(")), "is not a tokenizer"),
    "long words": (
        spec(model={"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                    "max_input_chars_per_word": 10**9, "vocab": {"a": 0, "##a": 1}}),
        "max_input_chars_per_word is 1000000000"),
    "merges of what is not there": (
        spec(model={"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}), "out of vocabulary"),
    "a part twice": ('{"decoder": null, "decoder": null}', "appears twice"),
    "deep sequences": ('{"normalizer": ' + '{"type":"Sequence","normalizers":[' * 20_000
                       + "]}" * 20_000 + "}", "is not a tokenizer"),
}  # fmt: skip

BACKTRACKING = spec(pre_tokenizer=split("(a|aa)+$"))
AT_REQUEST = {
    "a pattern that backtracks": (BACKTRACKING, "a" * 60 + "b", "retry-limit-in-match"),
    "no token for the unknown": (
        spec(model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}), "zzz",
        "Missing [UNK] token"),
    "no piece for the unknown": (
        spec(model={"type": "Unigram", "unk_id": None, "vocab": [["a", -1.0]],
                    "byte_fallback": False}), "zzz", "unk_id"),
    "a prefix longer than its tokens": (
        spec(model={"type": "BPE", "vocab": {"a": 0, "éa": 1, "aéa": 2}, "merges": [["a", "éa"]],
                    "continuing_subword_prefix": "éééé"}), "aa", "range end index"),
}  # fmt: skip


def save(directory: Path, text: str) -> str:
    (directory / "tokenizer.json").write_text(text)
    return str(directory)


@pytest.mark.parametrize("name", AT_LOAD)
def test_a_tokenizer_that_asks_for_too_much_is_refused_at_load(name, tmp_path, zygote) -> None:
    text, words = AT_LOAD[name]
    zygote.run("tokenizer", save(tmp_path, text)).check_refused("tokenizer.json", words)


@pytest.mark.parametrize(("part", "depth"), [("normalizer", 5_000_000), ("model", 20_000_000)])
def test_deep_brackets_are_refused(part: str, depth: int, tmp_path: Path, zygote: Zygote) -> None:
    directory = save(tmp_path, f'{{"{part}": ' + "[" * depth)
    zygote.run("tokenizer", directory).check_refused("tokenizer.json", "is not a tokenizer")


@pytest.mark.parametrize("name", AT_REQUEST)
def test_a_tokenizer_that_fails_at_a_prompt_refuses_the_prompt(name, tmp_path, zygote) -> None:
    text, prompt, words = AT_REQUEST[name]
    zygote.run("encode", save(tmp_path, text), prompt).check_refused(words)


def test_a_part_cannot_hide_behind_another_spelling(tmp_path: Path, zygote: Zygote) -> None:
    tokenizer = Tokenizer.load(Path(save(tmp_path, ESCAPED)), None)
    assert tokenizer.encode("a") == [0]
    result = zygote.run("encode", tmp_path, "a" * 40)
    result.check_cost()
    assert result.stdout == "1"


def test_a_panic_while_decoding_is_a_request_error(tmp_path: Path) -> None:
    strip = {"type": "Strip", "content": "a", "start": 10, "stop": 10}
    save(tmp_path, spec(decoder={"type": "Sequence", "decoders": [strip]}))
    tokenizer = Tokenizer.load(tmp_path, None)
    for call in (
        lambda: tokenizer.decode([0, 0]),
        lambda: tokenizer.token_str(0),
        lambda: tokenizer.join(["a", "a"]),
        lambda: Detokenizer(tokenizer, [0, 0]),
        lambda: Detokenizer(tokenizer).add([0]) + _finish(tokenizer, [0, 0]),
    ):
        with pytest.raises(RequestError, match="cannot decode the tokens"):
            call()


def _finish(tokenizer: Tokenizer, ids: list[int]) -> str:
    detokenizer = Detokenizer(tokenizer)
    detokenizer.add(ids)
    return detokenizer.finish()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"eos_token": "\\ud800"}', "eos_token has an unpaired surrogate"),
        ('{"bos_token": {"content": "\\udfff"}}', "bos_token has an unpaired surrogate"),
        ('{"additional_special_tokens": ["\\ud800"]}', "unpaired surrogate"),
        ('{"additional_special_tokens": 5}', "must be a list"),
        ('{"eos_token": ["\\u001b[2J"]}', r"\\x1b\[2J"),
    ],
)
def test_hostile_special_tokens_are_named(tmp_path: Path, config: str, message: str) -> None:
    save(tmp_path, spec())
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.load(tmp_path, None)


def test_pipes_devices_and_endless_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(TokenizerError, match="not a regular file"):
        Tokenizer.load(tmp_path, None)
    (tmp_path / "tokenizer.json").unlink()
    save(tmp_path, spec())
    (tmp_path / "tokenizer_config.json").symlink_to("/dev/zero")
    with pytest.raises(TokenizerError, match="not a regular file"):
        Tokenizer.load(tmp_path, None)
    (tmp_path / "tokenizer_config.json").unlink()
    with open(tmp_path / "tokenizer_config.json", "wb") as file:
        file.truncate(20 << 20)
    with pytest.raises(TokenizerError, match=r"has more than 16,777,216 bytes, which is the limit"):
        Tokenizer.load(tmp_path, None)


@pytest.mark.parametrize("kind", KINDS)
def test_ordinary_tokenizers_pass_unchanged_with_their_parts_in_any_order(kind: str) -> None:
    text = backend_of(KINDS[kind]()).to_str()
    values = json.loads(text)
    for given in (text, json.dumps(dict(sorted(values.items())), indent=1)):
        assert json.loads(checked_tokenizer(given, "tokenizer.json")) == values


@pytest.mark.parametrize(
    "regex",
    [  # GPT-2, cl100k, o200k, DeepSeek, digits in threes, Bloom, a newline of either kind
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s+(?!\S)|\s+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
        r"\d{1,3}(?=(?:\d{3})*\b)",
        " ?[^(\\s|[.,!?…。，、।۔،])]+",
        r"(?:\r?\n)+|(?>a+)|(?:a+)++b",
    ],
)
def test_patterns_of_real_tokenizers_pass(regex: str) -> None:
    checked_tokenizer(spec(pre_tokenizer=split(regex)), "tokenizer.json")
