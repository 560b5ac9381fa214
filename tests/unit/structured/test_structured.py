"""Check outputs that follow a schema, a regular expression, a list of choices or a grammar."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import re
import string
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import small_tokenizers

from mie import LLM, EngineConfig, RequestLimits, SamplingParams, StructuredOutputsParams
from mie.cli import main
from mie.errors import ConfigError, RequestError, RequestFailedError
from mie.load.engine import load_engine
from mie.load.settings import LoadSettings
from mie.structured.grammars import Grammars
from mie.text.tokenizer import Tokenizer

pytest.importorskip("llguidance", reason="the extra 'structured' is not installed")

EOS = 1
SCHEMA = {
    "type": "object",
    "properties": {
        "animal": {"enum": ["otter", "fox", "owl"]},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
    },
    "required": ["animal", "age", "tags"],
    "additionalProperties": False,
}
DATE = r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
HARD_CHOICES = ("yes", "no", "nay", 'a "quoted" \\ text', "two\nlines", "été 猫 😀", "/.*/", " ")


@cache
def bundled(**settings: Any) -> LLM:
    return LLM("bundled", num_threads=1, **settings)


def params_of(seed: int = 0, **more: Any) -> SamplingParams:
    """Return parameters that sample nearly at random, so that only the grammar gives structure."""
    structure = {
        name: more.pop(name)
        for name in [each.name for each in dataclasses.fields(StructuredOutputsParams)]
        if name in more
    }
    defaults = {"temperature": 1000.0, "max_tokens": 400, "seed": seed}
    return SamplingParams(
        structured_outputs=StructuredOutputsParams(**structure), **{**defaults, **more}
    )


def texts(llm: LLM, params: SamplingParams, prompt: str = "Once upon a time") -> list[str]:
    [output] = llm.generate(prompt, params, use_tqdm=False)
    return [choice.text for choice in output.outputs]


# The parameters.


def refuses(message: str, **fields: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        StructuredOutputsParams(**fields)


def test_bad_fields_are_refused_by_name():
    refuses("structured_outputs needs one of json, regex", whitespace_pattern=None)
    refuses("got none of them", json_object=False)
    refuses("got json and choice", json={}, choice=["a"])
    refuses("json must be a JSON schema, an object or a boolean; got [1]", json="[1]")
    refuses("json must be a JSON schema: Expecting", json="{")
    refuses("json must be a JSON schema: ", json={"const": float("nan")})
    refuses("json must be a JSON schema: it nests too deep", json="[" * 10**5)
    refuses("regex must be a string; got 3", regex=3)
    refuses("grammar is empty; it needs a rule named start", grammar="")
    refuses("whitespace_pattern must be a string; got 1", json={}, whitespace_pattern=1)
    refuses("choice must be a list of strings; got 'yes'", choice="yes")
    refuses("choice must have at least one text", choice=[])
    refuses("structural_tag must be a structural tag, an object; got []", structural_tag="[]")
    refuses("structural_tag must be a structural tag: Expecting", structural_tag="{")
    refuses("whitespace_pattern belongs to json", choice=["a"], whitespace_pattern=" ")
    refuses(
        "disable_additional_properties belongs to json",
        regex="a",
        disable_additional_properties=True,
    )
    refuses("'jsn'", jsn="{}")


def test_a_mapping_of_the_fields_is_accepted():
    params = SamplingParams(structured_outputs={"choice": ["a", "b"]})
    assert params.structured_outputs == StructuredOutputsParams(choice=("a", "b"))
    with pytest.raises(ConfigError, match="structured_outputs must be StructuredOutputsParams"):
        SamplingParams(structured_outputs="yes")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="guided_decoding is not supported: structured_outputs"):
        SamplingParams(guided_decoding={"json": "{}"})  # type: ignore[call-arg]


# Refusals before anything is queued.

EXCEEDED = "takes more than (1 s of CPU time|128 MiB of memory) to compile"
DEEP: Any = functools.reduce(lambda inner, _: {"items": inner}, range(200), {})  # type: ignore[return-value]
CONJUNCTION = [{"type": "string", "pattern": f".*{a}.{{9}}"} for a in string.ascii_letters[:40]]
BAD = [
    ({"regex": "("}, "regex that cannot be followed: .*invalid regex"),
    ({"regex": r"(a)\1"}, "backreferences are not supported"),
    ({"grammar": "start: x"}, 'grammar that cannot be followed: .*unknown name: "x"'),
    ({"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000}, "too deeply nested"),
    ({"json": {"not": {"multipleOf": 2}}}, "uses 'not' of 'multipleOf', which is not supported"),
    ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    ({"json": {"type": "thing"}}, "Invalid type: thing"),
    ({"json": {"$ref": "https://example.org/x"}}, "which is not in the schema"),
    ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "Unsatisfiable schema"),
    ({"json": {"$ref": "#"}}, "no finite text matches it"),
    ({"regex": r"[^\s\S]"}, "regex that cannot be followed: no finite text matches it"),
    ({"json": {"minLength": 10**20}}, "minLength 100000000000000000000, which no answer reaches"),
    ({"json": {"anyOf": [{"const": 2**64}]}}, "const 18446744073709551616, which llguidance would"),
    ({"json": {"type": "integer", "minimum": 2**63}}, "has minimum 9223372036854775808, which"),
    ({"json": {"items": DEEP}}, "it nests more than 124 levels deep, which is the limit"),
    ({"json": {"type": "integer", "multipleOf": 1_000_003}}, EXCEEDED),
    ({"json": {"allOf": CONJUNCTION}}, EXCEEDED),
]


@pytest.mark.parametrize(("structure", "message"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_what_cannot_be_followed_is_refused_before_it_is_queued(structure, message: str):
    llm = bundled()
    with pytest.raises(RequestError, match=message) as error:
        llm.generate(["a", "b"], [SamplingParams(), params_of(**structure)], use_tqdm=False)
    assert "structured_outputs" in str(error.value)
    assert len(str(error.value)) < 1000
    assert not llm.engine.has_work


def chain_of_rules(count: int) -> str:
    rules = [f"r{i}: r{i + 1}" for i in range(count)]
    return "\n".join(["start: r0", *rules, f'r{count}: "a"'])


def chain_of_references(count: int) -> dict[str, Any]:
    definitions: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    definitions[f"d{count}"] = {"const": 7}
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


def test_long_chains_of_rules_are_refused_and_shorter_ones_work():
    llm = bundled()
    assert texts(llm, params_of(grammar=chain_of_rules(254))) == ["a"]
    assert texts(llm, params_of(json=chain_of_references(254))) == ["7"]
    for structure in (
        {"grammar": chain_of_rules(5000)},
        {"json": chain_of_references(1000)},
        {"grammar": f"start: %json {json.dumps(chain_of_references(1000))}"},
    ):
        with pytest.raises(RequestError, match="too long a chain of rules or references"):
            texts(llm, params_of(**structure))


def test_the_size_is_limited():
    long = params_of(regex="a" * 2**16)
    assert long.structured_outputs.num_chars == 2**16
    with pytest.raises(ConfigError, match="structured_outputs may have at most 65536 characters"):
        params_of(choice=["a" * 2**16, "b"])
    eleven = params_of(choice=["a" * 6, "b" * 5])
    with pytest.raises(ConfigError, match="at most 10 characters; got 11"):
        eleven.verified(RequestLimits(max_grammar_chars=10))


def test_what_becomes_too_complex_fails_alone():
    llm = bundled()
    free = SamplingParams(temperature=0, max_tokens=5)
    [alone] = llm.generate("Once", free, use_tqdm=False)
    complex_one = params_of(regex="[xy]{60}((a{1000}){1000}){1000}")
    with pytest.raises(RequestFailedError, match="too many states") as error:
        llm.generate(["Once", "Once"], [complex_one, free], use_tqdm=False)
    assert error.value.outputs[1].outputs[0].token_ids == alone.outputs[0].token_ids


def test_masks_that_cost_too_much_are_found_before_the_prompt_is_computed():
    costly = {"type": "string", "pattern": "^(x|((a{1000}){1000}){1000})$"}
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "b": costly}}
    for structure in (
        {"json": {**schema, "required": ["a", "b"]}},
        {"regex": "[xy]{9}((a{1000}){1000}){1000}"},
        {"grammar": 'start: /[a-z]+/ ":" /((a{1000}){1000}){1000}/'},
    ):
        with pytest.raises(RequestError, match=r"cannot be followed|takes more than"):
            bundled().generate("Once", params_of(**structure), use_tqdm=False)
        assert not bundled().engine.has_work


def test_texts_with_patterns_and_lengths_are_followed_with_a_large_vocabulary():
    """The first mask of such a text costs more with more tokens."""
    tokenizer = small_tokenizers.many_words(12_000)
    grammars = Grammars(tokenizer, tokenizer.vocab_size, [EOS])
    for pattern, length in (
        (r"^[^/]+/[^/]+$", 100),
        (r"^\S+@\S+\.\S+$", 320),
        (r"^(\w+\s){5,50}\w+$", 600),
        ("foo", 500),
    ):
        schema = {"type": "string", "pattern": pattern, "maxLength": length}
        matcher = grammars.start(StructuredOutputsParams(json=schema))
        for token in tokenizer.encode('"ab', add_special_tokens=False):
            assert matcher.mask()[token // 8] >> token % 8 & 1
            matcher.accept(token)
        assert any(matcher.mask())


GBNF = """
# A list of animals
root   ::= "[" animal ("," animal)* "]"   # at least one
animal ::= "fox" | "otter" digit{1,2}
digit  ::= [0-9]
"""


def test_grammars_in_gbnf_are_converted():
    for text, is_good in (
        ("[fox]", True),
        ("[otter12,fox]", True),
        ("[]", False),
        ("[owl]", False),
    ):
        assert is_accepted(text, grammar=GBNF) == is_good
    for grammar, message in (
        ("root ::= unknown", "an error at line 1, column 10: the rule unknown is not defined"),
        ('other ::= "a"', "has no rule named root"),
        ("root ::= [a-", "line 1, column 10: no rule, text, class or operator begins with '[a-'"),
        ("root ::= " + "(" * 2000 + '"a"' + ")" * 2000, "too deeply nested"),
    ):
        with pytest.raises(RequestError, match=re.escape(message)):
            texts(bundled(), params_of(grammar=grammar))


def test_the_schemas_of_a_grammar_follow_the_same_rules():
    numbers = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    compact = {"x-guidance": {"whitespace_flexible": False, "lenient": True}}

    def grammar(schema: Any) -> str:
        return f'start: "%json {{" %json {json.dumps({**schema, **compact})} // %json'

    assert is_accepted('%json {{"a":1,"b":2}', grammar=grammar(numbers))
    closed = {"grammar": grammar(numbers), "disable_additional_properties": True}
    assert is_accepted('%json {{"a":1}', **closed)
    assert not is_accepted('%json {{"a":1,"b":2}', **closed)
    for schema, message in (
        ({"enum": [2**53 + 1]}, "has enum 9007199254740993, which llguidance would change"),
        ({"not": {"multipleOf": 2}}, "uses 'not' of 'multipleOf'"),
    ):
        with pytest.raises(RequestError, match=message):
            texts(bundled(), params_of(grammar=grammar(schema)))


def test_without_a_tokenizer_they_are_refused():
    llm = bundled(skip_tokenizer_init=True)
    with pytest.raises(RequestError, match="structured_outputs needs a tokenizer"):
        llm.generate({"prompt_token_ids": [5]}, params_of(regex="a"), use_tqdm=False)
    engine = load_engine(llm.directory, LoadSettings(engine=EngineConfig(num_blocks=8)))
    with pytest.raises(RequestError, match="structured_outputs needs a tokenizer"):
        engine.add_request([5], params_of(regex="a"))
    assert not engine.has_work


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    grammars = Grammars(small_tokenizers.byte_level(), 512, [EOS])
    with pytest.raises(RequestError, match=re.escape("pip install 'llguidance<2'")):
        grammars.start(StructuredOutputsParams(regex="a"))


# Outputs.


@pytest.mark.parametrize("seed", range(2))
def test_every_kind_gives_what_it_describes(seed: int):
    llm = bundled()
    for text in texts(llm, params_of(seed, regex=DATE, n=4)):
        assert re.fullmatch(DATE, text)
    assert set(texts(llm, params_of(seed, choice=HARD_CHOICES, n=32))) <= set(HARD_CHOICES)
    for text in texts(llm, params_of(seed, grammar='start: "<" ("ab" | "c"){1,3} ">"', n=4)):
        assert re.fullmatch(r"<(ab|c){1,3}>", text)
    for text in texts(llm, params_of(seed, json=SCHEMA, n=4)):
        record = json.loads(text)
        assert list(record) == ["animal", "age", "tags"]
        assert record["animal"] in ("otter", "fox", "owl")
        assert 1 <= record["age"] <= 99
        assert len(record["tags"]) <= 2


def test_every_choice_is_reachable_even_among_thousands():
    assert set(texts(bundled(), params_of(choice=HARD_CHOICES, n=120))) == set(HARD_CHOICES)
    many = [f"{'xyz'[i % 3]}{i}" for i in range(8000)]
    assert {*texts(bundled(), params_of(choice=many, n=8))} <= {*many}


@cache
def bundled_grammars() -> Grammars:
    return Grammars(bundled().tokenizer, 2048, [EOS])


def is_accepted(text: str, **structure: Any) -> bool:
    """Return whether a whole answer follows a description."""
    tokenizer = bundled().tokenizer
    ids = [*tokenizer.encode(text, add_special_tokens=False), EOS]
    matcher = bundled_grammars().start(StructuredOutputsParams(**structure))
    return matcher.validate(ids) == len(ids)


def test_a_json_object_is_an_object():
    params = params_of(json_object=True, temperature=0.0, max_tokens=100)
    assert texts(bundled(), params)[0].startswith("{")
    for text, complete in (('{"a":[1,true,null]}', True), ("[1]", False), ('{"a": 1}', False)):
        assert is_accepted(text, json_object=True) == complete, text


@pytest.mark.parametrize(
    ("options", "accepted", "refused"),
    [
        ({}, ['{"a":1,"b":2}'], ['{"a": 1,"b":2}', '{"a":1, "b":2}', '{ "a":1,"b":2}']),
        ({"disable_any_whitespace": False}, ['{ "a" : 1,\n"b":2}'], ['{"a":1 "b":2}']),
        ({"whitespace_pattern": "_?"}, ['{_"a":1,"b":_2}'], ['{ "a":1,"b":2}']),
        ({"whitespace_pattern": "_{2}"}, ['{__"a":1,"b":__2}'], ['{_"a":1,"b":2}']),
    ],
)
def test_whitespace(options: dict[str, Any], accepted: list[str], refused: list[str]):
    integers = {"a": {"type": "integer"}, "b": {"type": "integer"}}
    schema = {"type": "object", "properties": integers, "required": ["a", "b"]}
    for text in (*accepted, *refused):
        assert is_accepted(text, json=schema, **options) == (text in accepted), text


def test_additional_properties_can_be_forbidden_everywhere():
    inner = {"type": "object", "properties": {"properties": {"type": "integer"}}}
    schema = {
        "$defs": {"inner": inner},
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/inner"}, "b": {"anyOf": [{"type": "null"}, inner]}},
        "required": ["a"],
    }
    closed = {"disable_additional_properties": True}
    for text in ('{"a":{"properties":1}}', '{"a":{},"b":{"properties":2}}'):
        assert is_accepted(text, json=schema)
        assert is_accepted(text, json=schema, **closed)
    for text in ('{"a":{},"c":1}', '{"a":{"c":1}}', '{"a":{},"b":{"c":1}}'):
        assert is_accepted(text, json=schema)
        assert not is_accepted(text, json=schema, **closed)


def test_each_of_several_ends_may_follow_a_complete_text():
    tokenizer = bundled().tokenizer
    ends = [EOS, max(tokenizer.special_ids - {EOS})]
    [yes] = tokenizer.encode("y", add_special_tokens=False)[-1:]
    matcher = Grammars(tokenizer, 2048, ends).start(StructuredOutputsParams(regex="y+"))
    assert not {*bits(matcher.mask())} & {*ends}
    matcher.accept(yes)
    assert {*bits(matcher.mask())} >= {yes, *ends}
    for end in ends:
        assert matcher.validate([yes, end]) == 2
    only = Grammars(tokenizer, 2048, ends).start(StructuredOutputsParams(regex="y"))
    only.accept(yes)
    assert bits(only.mask()) == sorted(ends)


# Determined tokens.


@pytest.mark.parametrize(
    ("settings", "more", "num_steps", "num_sampled"),
    [
        ({}, {}, 1, 1),
        ({}, {"logprobs": 1}, 2, 2),  # the end waits for the log-probabilities before it
        ({}, {"n": 3}, 2, None),  # the other choices have rows from the second step on
        ({"max_forced_run": 4}, {}, None, None),
        ({"max_forced_run": 0}, {}, None, None),
    ],
)
def test_determined_tokens_take_no_step(settings, more, num_steps, num_sampled):
    llm = bundled(**settings)
    before = llm.engine.stats.num_steps
    answer = "a long answer, which the first letter determines"
    [output] = llm.generate("Hm", params_of(choice=[answer], **more), use_tqdm=False)
    num_tokens = len(output.outputs[0].token_ids)
    num_taken = llm.engine.stats.num_steps - before
    assert {choice.text for choice in output.outputs} == {answer}
    assert num_tokens > 10
    if settings:
        assert num_taken == -(-num_tokens // (settings["max_forced_run"] + 1))
    else:
        assert num_taken == num_steps
    if num_sampled is not None:
        assert output.metrics.num_forced_tokens == num_tokens - num_sampled
    [counter] = [each for each in llm.get_metrics() if each.name == "mie:tokens_forced"]
    assert (counter.value > 0) == (settings != {"max_forced_run": 0})


# With other parameters.


def test_forced_tokens_must_be_allowed():
    llm = bundled()
    ids = llm.tokenizer.encode("ab", add_special_tokens=False)
    [text] = texts(llm, params_of(regex="abc+", trace_decode_token_ids=ids))
    assert re.fullmatch("abc+", text)
    message = r"does not allow trace_decode_token_ids\[0\]"
    with pytest.raises(RequestError, match=message):
        texts(llm, params_of(regex="x+", trace_decode_token_ids=ids))


EMPTY: list[dict[str, Any]] = [
    {"min_tokens": 50, "max_tokens": 60},
    {"allowed_token_ids": [EOS, 2, 3]},
    {"bad_words_token_ids": [[EOS]]},
]


@pytest.mark.parametrize("more", EMPTY, ids=lambda more: min(more))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_empty_intersection_fails_that_request_alone(more, temperature: float):
    llm = bundled()
    free = SamplingParams(temperature=1.0, seed=3, max_tokens=20)
    [alone] = llm.generate("Once", free, use_tqdm=False)
    bad = params_of(regex="abc", temperature=temperature, **more)
    with pytest.raises(RequestFailedError, match="no token can follow") as error:
        llm.generate(["Once", "Once", "Once"], [free, bad, free], use_tqdm=False)
    one, failed, other = error.value.outputs
    assert "no token can follow" in failed.error
    assert [choice.finish_reason for choice in failed.outputs] == ["error"]
    for neighbour in (one, other):
        assert neighbour.outputs[0].token_ids == alone.outputs[0].token_ids
    assert texts(llm, params_of(regex="abc")) == ["abc"]


# After an exception the tokens are those of a request alone.

PROMPT = "Once upon a time there was an otter who lived by the sea."


def mixed() -> list[SamplingParams]:
    return [
        params_of(1, json=SCHEMA, n=3, max_tokens=120),
        SamplingParams(temperature=1.0, seed=2, max_tokens=60),
        params_of(3, regex=f"({DATE} ){{3}}", temperature=1.0, max_tokens=120),
        SamplingParams(temperature=0.0, max_tokens=40, n=2),
        params_of(5, choice=HARD_CHOICES, n=2, presence_penalty=1.0),
        params_of(6, json=SCHEMA, disable_any_whitespace=False, temperature=0.0, max_tokens=80),
    ]


def tokens_of(outputs: list[Any]) -> list[list[list[int]]]:
    return [[list(choice.token_ids) for choice in output.outputs] for output in outputs]


@cache
def alone() -> list[list[list[int]]]:
    llm = bundled(dtype="float64")
    return [tokens_of(llm.generate(PROMPT, each, use_tqdm=False))[0] for each in mixed()]


SLOW = pytest.mark.slow


@pytest.mark.parametrize("when", [pytest.param(1, marks=SLOW), pytest.param(5, marks=SLOW), 20])
@pytest.mark.parametrize("where", ["accept", "mask"])
def test_an_exception_in_a_step_changes_no_token(where: str, when: int, monkeypatch):
    """After an error that is not the request's fault, a matcher's state is made from the tokens."""
    from mie.structured.matcher import Matcher

    llm = LLM("bundled", num_threads=1, dtype="float64")
    original, calls = getattr(Matcher, where), []

    def interrupted(self: Matcher, *args: Any) -> Any:
        calls.append(1)
        result = original(self, *args)
        if len(calls) == when:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(Matcher, where, interrupted)
    for each in mixed():
        llm.add_request(PROMPT, each)
    done: dict[str, Any] = {}
    num_interrupts = 0
    while llm.has_work:
        try:
            for output in llm.step():
                done[output.request_id] = output
        except KeyboardInterrupt:
            num_interrupts += 1
    assert num_interrupts == 1
    assert sorted(tokens_of(list(done.values()))) == sorted(alone())


# The masks.

GRAMMARS: list[dict[str, Any]] = [
    {"json": SCHEMA},
    {"json": SCHEMA, "disable_any_whitespace": False},
    {"regex": r"[a-c]{0,3}(é|猫|dear reader|\n)*x"},
    {"grammar": 'start: e\ne: n | "(" e ("+" | "-") e ")"\nn: /[0-9]{1,3}/'},
    {"choice": HARD_CHOICES},
]
TOKENIZERS = ["byte_level", "llama2", "bundled"]


def tokenizer_named(name: str) -> Tokenizer:
    return bundled().tokenizer if name == "bundled" else getattr(small_tokenizers, name)()  # type: ignore[return-value]


def bits(mask: bytes) -> list[int]:
    return [i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1]


@pytest.mark.parametrize("num_runs", [2, pytest.param(18, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("structure", GRAMMARS, ids=lambda each: "-".join(each))
def test_a_mask_holds_exactly_the_tokens_that_can_be_accepted(name, structure, num_runs):
    """Try every token at every step of random runs, with a vocabulary that is padded.

    If the next characters are determined, a mask holds the one token that the tokenizer would use
    for them.
    """
    tokenizer = tokenizer_named(name)
    eos = tokenizer.eos_token_id
    size = tokenizer.vocab_size + 45
    grammars = Grammars(tokenizer, size, [eos])
    rng = random.Random(f"{name} {structure}")
    for _ in range(max(1, num_runs // 4) if name == "bundled" else num_runs):
        matcher = grammars.start(StructuredOutputsParams(**structure))
        for _ in range(12):
            allowed = bits(matcher.mask())
            possible = [i for i in range(size) if matcher.validate([i]) == 1]
            assert matcher.determined() == (allowed[0] if len(allowed) == 1 else None)
            assert [i for i in range(size) if matcher.allows(i)] == allowed
            assert bits(matcher._matcher.compute_bitmask()) == allowed
            if forced := matcher._matcher.compute_ff_tokens():
                assert allowed == [forced[0]]
                assert allowed[0] in possible
            else:
                assert allowed == possible
            assert allowed, "nothing can follow"
            assert max(allowed) < tokenizer.vocab_size, "padding is allowed"
            chosen = rng.choice(allowed)
            matcher.accept(chosen)
            if chosen == eos:
                break


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_masks_of_choices_are_the_tokens_that_continue_one(name: str):
    """The oracle knows no grammar: a token may follow if its text continues one of the choices.

    The library may allow only one of several tokens with equal texts, such as a letter and its
    byte.
    """
    tokenizer = tokenizer_named(name)
    eos, prompt = tokenizer.eos_token_id, tokenizer.encode("cafés", add_special_tokens=False)
    choices = ["cat", "cafe", "cafes", "cafeteria", "a b", "a  b"]
    grammars = Grammars(tokenizer, tokenizer.vocab_size, [eos])
    before = len(tokenizer.decode(prompt))
    texts_of = {
        i: tokenizer.decode([*prompt, i])[before:]
        for i in range(tokenizer.vocab_size)
        if i not in tokenizer.special_ids
    }
    whole = {i: text for i, text in texts_of.items() if text and "\ufffd" not in text}
    rng = random.Random(name)
    for _ in range(20):
        matcher, text = grammars.start(StructuredOutputsParams(choice=choices)), ""
        while True:
            allowed = bits(matcher.mask())
            assert (eos in allowed) == (text in choices)
            got = {whole[i] for i in allowed if i in whole}
            possible = {
                new for new in whole.values() if any(c.startswith(text + new) for c in choices)
            }
            next_letters = {c[len(text)] for c in choices if c.startswith(text) and c != text}
            if len(next_letters) == 1 and text not in choices:  # the library chooses the token
                assert got
                assert got <= possible
            else:
                assert got == possible
            assert all(i in whole or i == eos for i in allowed)
            chosen = rng.choice(allowed)
            matcher.accept(chosen)
            if chosen == eos:
                break
            text += whole[chosen]


def test_tokens_can_be_taken_back():
    grammars = Grammars(bundled().tokenizer, 2048, [EOS])
    matcher = grammars.start(StructuredOutputsParams(json=SCHEMA))
    masks = [matcher.mask()]
    rng = random.Random(0)
    for _ in range(6):
        matcher.accept(rng.choice(bits(masks[-1])))
        masks.append(matcher.mask())
    matcher.rollback(0)
    assert matcher.mask() == masks[6]
    matcher.rollback(4)
    assert matcher.mask() == masks[2]


# The command line.


def test_the_options_of_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(SCHEMA))
    grammar = 'start: "a" | "b"'
    for options, pattern in (
        (["--json-schema", f"@{schema}"], r'\{"animal":.*\}'),
        (["--regex", DATE], DATE),
        (["--choice", "yes", "--choice", "no"], "yes|no"),
        (["--grammar", grammar], "a|b"),
    ):
        assert main(["generate", "--temperature", "9", "--seed", "1", *options, "Hi"]) == 0
        assert re.fullmatch(pattern, capsys.readouterr().out.strip())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bias", [0.0, 100.0])
@pytest.mark.parametrize(
    ("structure", "is_endless"),
    [
        ({"regex": "a*"}, True),
        ({"regex": "(ab)+"}, True),
        ({"grammar": 'start: "x" start | "y"*'}, True),
        ({"regex": "abc"}, False),
        ({"choice": ["one"]}, False),
    ],
)
def test_ignore_eos_ends_a_structure_only_where_nothing_else_may_follow(
    structure: dict[str, Any], is_endless: bool, bias: float, temperature: float
):
    llm = bundled()
    ends = llm.engine.eos_token_ids
    params = params_of(
        **structure,
        ignore_eos=True,
        max_tokens=12,
        temperature=temperature,
        logit_bias=dict.fromkeys(ends, bias),
    )
    [output] = llm.generate("Hm", params, use_tqdm=False)
    [answer] = output.outputs
    if is_endless:
        assert not {*answer.token_ids} & {*ends}
        assert (answer.finish_reason, len(answer.token_ids)) == ("length", 12)
    else:
        first_end = next(at for at, token in enumerate(answer.token_ids) if token in ends)
        assert llm.get_tokenizer().decode(answer.token_ids[:first_end]) == (
            structure.get("regex") or structure["choice"][0]
        )
