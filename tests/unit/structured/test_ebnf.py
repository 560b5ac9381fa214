"""Check grammars in EBNF: which texts they have, and where their errors are."""

from __future__ import annotations

import json
import random
import re
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
from accepted_texts import SQL, accepts, grammars, tokens_of
from hypothesis import given
from hypothesis import strategies as st

from mie import StructuredOutputsParams
from mie.errors import RequestError
from mie.structured.ebnf import lark_of_ebnf

pytest.importorskip("llguidance", reason="the extra 'structured' is not installed")

JSON = r"""
root ::= basic_array | basic_object
basic_any ::= basic_number | basic_string | "true" | "false" | "null" | basic_array | basic_object
basic_number ::= ("0" | "-"? [1-9] [0-9]*) ("." [0-9]+)? ([eE] [+-]? [0-9]+)?
basic_string ::= (([\"] basic_string_1 [\"]))
basic_string_1 ::= "" | [^"\\\x00-\x1F] basic_string_1 | "\\" escape basic_string_1
escape ::= ["\\/bfnrt] | "u" [A-Fa-f0-9] [A-Fa-f0-9] [A-Fa-f0-9] [A-Fa-f0-9]
basic_array ::= "[" ("" | ws basic_any (ws "," ws basic_any)*) ws "]"
basic_object ::=
  "{"
  ("" | ws basic_string ws ":" ws basic_any ( ws "," ws basic_string ws ":" ws basic_any)*)
  ws "}"
ws ::= [ \n\t]*
"""
"""JSON as XGrammar's documents write it."""

CASES = [
    (SQL, ["SELECT col_1  from table_2  where col_2 = 1 "], ["SELECT col_3 ", ""]),
    ('root ::= word "ing"\nword ::= [a-z]+', ["singing", "aing"], ["sing ", "ing", "ingx"]),
    ('root ::= "a" "bd" | "ab" "c"', ["abd", "abc"], ["ab", "abdc"]),
    ("root ::= expr\nexpr ::= expr [+*] expr | [0-9]+", ["1+2*33"], ["1+", "+1"]),
    ('root ::=\n  "a"\n  | "b" # one\n  # two\n  | c\nc ::= "c"', ["a", "b", "c"], ["ab", "bc"]),
    ('root ::= [a-c]{2,3} "x"{2} ("y" "z"){1,}', ["abxxyz", "abcxxyzyz"], ["axxyz", "abxyz"]),
    (r'root ::= "\x41\u00e9\U0001F600\t\"\\" [\-\]\[^]', ['Aé😀\t"\\-', 'Aé😀\t"\\]'], ["A-"]),
    ("root ::= 'it' | \"'\" # quotes", ["it", "'"], ["'it'"]),
    ('root ::= . [^a] "/"', ["\n\n/", "ab/"], ["aa/", "a/"]),
    ('root ::= start\nstart ::= 1st-Rule\n1st-Rule ::= "s" | ""', ["s", ""], ["ss"]),
    ('Root ::= "x"\nroot ::= ROOT Root\nROOT ::= "y"', ["yx"], ["xy", "xx"]),
    ('root ::= (| "b")+ "c"?', ["", "b", "bbc", "c"], ["cb"]),
    ('root ::= "#" [#] # "no"', ["##"], ["#"]),
    ('root ::= "a"\r\n    "b"\r\n', ["ab"], ["a"]),
    ('root ::= s "!"\ns ::= [a-c] s | "d" s | ""', ["abcd!", "!", "da!"], ["abe!", "ab"]),
    ('root ::= ([a-c] | "-" [0-9]{1,2})* ("x" | "xy")', ["ab-1cx", "-12xy", "x"], ["-123x", "a-x"]),
]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_grammar_has_the_texts_that_it_describes(number: int):
    grammar, good, bad = CASES[number]
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []


def test_a_grammar_of_json_has_the_texts_that_a_parser_reads():
    rng = random.Random(1)

    def value(depth: int) -> Any:
        if depth == 0 or rng.random() < 0.3:
            return rng.choice([0, -12, 1.5, 1e-7, "", 'a"\\\n', "é", True, False, None])
        values = [value(depth - 1) for _ in range(rng.randrange(3))]
        return values if rng.random() < 0.5 else {str(i): each for i, each in enumerate(values)}

    matcher = grammars().start(StructuredOutputsParams(grammar=JSON))
    kinds = set()
    for _ in range(80):
        text = json.dumps([value(3)], ensure_ascii=False, indent=rng.choice([None, 1]))
        if rng.random() < 0.5:
            place = rng.randrange(len(text))
            text = text[:place] + rng.choice(["", *'"[]{},:1e']) + text[place + 1 :]
        try:
            is_json = isinstance(json.loads(text), (list, dict))
        except ValueError:
            is_json = False
        if re.search(r"-0|\b0\d", text):
            continue  # this grammar has no -0
        ids = tokens_of(text)
        assert (matcher.validate(ids) == len(ids)) == is_json, text
        kinds.add(is_json)
    assert kinds == {True, False}


LETTERS = {"a": "a", "b": "b", "[ab]": "[ab]", "[^a]": "[^a]", ".": r"[\s\S]", "c": "c"}
atoms = st.sampled_from([*LETTERS]).map(
    lambda each: (each if each in ("[ab]", "[^a]", ".") else f'"{each}"', LETTERS[each])
)
texts = st.sampled_from(["ab", "abc", "cb", ""]).map(lambda each: (f'"{each}"', each))


def longer(inner: Any) -> Any:
    counts = st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{1,}"])
    repeated = st.tuples(inner, counts).map(
        lambda each: (f"({each[0][0]}){each[1]}", f"(?:{each[0][1]}){each[1]}")
    )
    lists = st.lists(inner, min_size=1, max_size=3)
    joined = lists.map(lambda each: (" ".join(a for a, _ in each), "".join(b for _, b in each)))
    chosen = lists.map(
        lambda each: (f"({' | '.join(a for a, _ in each)})", f"(?:{'|'.join(b for _, b in each)})")
    )
    return st.one_of(repeated, joined, chosen)


def test_long_lexemes_change_no_text():
    """Random grammars without recursion have the texts of a regular expression."""
    seen: Counter[Any] = Counter()

    @given(
        st.recursive(st.one_of(atoms, texts), longer, max_leaves=8),
        st.lists(st.text(st.sampled_from("abc-"), max_size=5), min_size=6, max_size=6),
        st.sampled_from(["", "-"]),
    )
    def check(grammar: tuple[str, str], found: list[str], between: str):
        ebnf = f'root ::= {grammar[0]} "{between}" part\npart ::= [a-b] part | "c"'
        seen["+/" in lark_of_ebnf(ebnf)] += 1  # the rule `part` has a run
        with suppress(RequestError):  # too ambiguous to be followed
            accepts(ebnf, "")
            for text in (*found, "", "ab", "aac", "abc", "cab-bc", "ab-c", "b-ac"):
                expected = re.fullmatch(f"(?:{grammar[1]}){between}[ab]*c", text) is not None
                assert accepts(ebnf, text) == expected, text
            seen["followed"] += 1

    check()
    assert min(seen[True], seen[False]) > 2
    assert seen["followed"] > (seen[True] + seen[False]) / 2


GBNF = r"""
root   ::= value
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
"""JSON as llama.cpp writes it. Its numbers are not LL(1)."""


def test_json_of_llama_cpp_has_long_lexemes():
    assert "+/" in lark_of_ebnf(GBNF)
    for text in ('{"a": [1, -20.5e3, "\\"\\n"], "b":\n  null }', "0", '"é"', "[ ]"):
        assert accepts(GBNF, text), text
        json.loads(text)
    for text in ("01", "1.", "[1 ", '"\n"', "{,}", "1  2"):
        assert not accepts(GBNF, text), text


ERRORS = [
    ("root ::= x", "line 1, column 10: the rule x is not defined"),
    ('root ::= "b"\n\n  ("a"', "line 3, column 3: the parenthesis is not closed"),
    ('root ::= (("a")\nx ::= "b"', "line 1, column 10: the parenthesis is not closed"),
    ('root ::= "a")', "line 1, column 13: the parenthesis closes nothing"),
    ('root ::= "a\nb ::= "c"', "line 1, column 10: no rule, text, class or operator begins with"),
    ('root ::= "a" ;', "line 1, column 14: no rule, text, class or operator begins with"),
    ('root ::= "a"\n ** ', r"line 2, column 3: \* follows nothing that can be repeated"),
    ("root ::= | ?", r"line 1, column 12: \? follows nothing that can be repeated"),
    ("root ::= [z-a]", r"line 1, column 10: the class \[z-a\] has a range that ends before"),
    (r'root ::= "a\q"', r"line 1, column 12: the escape \\q is unknown"),
    (r'root ::= "\uD800"', r"line 1, column 11: \\uD800 is no character"),
    ('root ::= "a"\nroot ::= "b"', "line 2, column 1: the rule root is defined twice"),
    ('"a"\nroot ::= "b"', "line 1, column 1: expected a rule and ::=, got"),
    ('root ::= ::= "b"', "line 1, column 10: .*::="),
    ('roots ::= "b"', "has no rule named root"),
    ("root ::= root", "no finite text matches it"),
    ('root ::= [] "x"', "no finite text matches it"),
]


@pytest.mark.parametrize("number", range(len(ERRORS)))
def test_an_error_has_its_line_and_column(number: int):
    grammar, message = ERRORS[number]
    with pytest.raises(RequestError, match=message):
        accepts(grammar, "")


def test_long_grammars_are_read_in_linear_time():
    for piece in ("#", "\n", "a ", "a\n", "#\n", '"', "[", "(", ". ", "-", " "):
        began = time.process_time()
        with pytest.raises(RequestError):
            lark_of_ebnf("x ::= " + piece * (60_000 // len(piece)))
        assert time.process_time() - began < 2
