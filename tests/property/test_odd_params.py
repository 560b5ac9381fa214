"""Check that each odd value of a sampling parameter is refused by name, or a step runs with it.

The values are numbers of all types of Python and NumPy, the ends of their ranges, and things that
are not numbers. A parameter that passes must not make a step raise or warn, on the CPU or in the
packing of the GPU's sampler.
"""

from collections import Counter
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from rare import check_until_seen

from mie import EngineConfig, RequestOutputKind, SamplingParams
from mie.engine.engine import Engine
from mie.errors import ConfigError, RequestError
from mie.load.engine import load_engine
from mie.load.settings import LoadSettings
from mie.ops_gpu.sampling import pack

seen: Counter[str] = Counter()


def numpy_scalars() -> list[Any]:
    scalars = []
    for code in np.typecodes["All"]:
        dtype = np.dtype(code)
        if dtype.kind in "iufcb":
            scalars += [dtype.type(value) for value in (0, 1, 2)]
        if dtype.kind in "if":
            scalars.append(dtype.type(-1))
        if dtype.kind == "f":
            scalars += [dtype.type(v) for v in (0.5, "nan", "inf", "-inf", "-0.0")]
            scalars += [np.finfo(dtype).tiny, np.finfo(dtype).smallest_subnormal]
        if dtype.kind in "iu":
            scalars += [dtype.type(np.iinfo(dtype).max), dtype.type(np.iinfo(dtype).min)]
    return [*scalars, np.datetime64("NaT"), np.timedelta64("NaT"), np.timedelta64(3)]


ENDS = [0, 1, -1, 2, 3, 16, 39, 40, 2**31, 2**63, -(2**63), 2**64, 10**400, -(10**400)]
FLOATS = [0.0, -0.0, 0.5, 1.0, 1.5, 5e-324, 1e-308, 1e-3, 1e3, 1e308, float("nan"), float("inf")]
FRACTIONS = [Fraction(1, 3), Fraction(-1, 3), Fraction(3), Fraction(1, 10**400), Fraction(10**400)]
DECIMALS = [Decimal("0.5"), Decimal(1), Decimal("NaN"), Decimal("Infinity")]
OTHERS = [None, True, False, "1", "", b"1", 1j, [], [1], {}]
OTHERS += [np.array(1), np.array([1, 2]), object()]


def one_of(values: list[Any]) -> st.SearchStrategy[Any]:
    """Draw one of the values, which need not be hashable."""
    return st.integers(0, len(values) - 1).map(values.__getitem__)


KINDS = [int, float, Fraction, np.int8, np.uint16, np.int64, np.float16, np.float32, np.longdouble]
small = st.tuples(st.integers(0, 3), one_of(KINDS)).map(lambda pair: pair[1](pair[0]))
ids = st.tuples(st.integers(0, 39), one_of([int, np.int8, np.uint64])).map(lambda p: p[1](p[0]))
numbers = st.one_of(
    *(small, small, small),
    one_of([*ENDS, *FLOATS, *FRACTIONS]),
    one_of(numpy_scalars()),
    one_of([*DECIMALS, *OTHERS]),
    st.integers(-3, 50),
    st.floats(),
    st.floats(0, 2, allow_subnormal=True),
)
lists = st.one_of(st.lists(ids, min_size=1, max_size=4), st.lists(numbers, max_size=3), numbers)
maps = st.one_of(
    st.dictionaries(ids, small, max_size=3),
    st.dictionaries(st.integers(-1, 41) | st.text(max_size=2), numbers, max_size=3),
    numbers,
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(
        (
            *("n", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens"),
            *("repetition_penalty", "presence_penalty", "frequency_penalty"),
            *("logprobs", "prompt_logprobs", "truncate_prompt_tokens"),
        ),
        numbers,
    ),
    **dict.fromkeys(
        ("ignore_eos", "detokenize", "skip_reading_prefix_cache"), st.booleans() | numbers
    ),
    "output_kind": st.sampled_from(RequestOutputKind) | numbers,
    **dict.fromkeys(("stop_token_ids", "allowed_token_ids", "trace_decode_token_ids"), lists),
    **dict.fromkeys(("stop", "bad_words"), st.one_of(st.lists(st.text(max_size=3)), lists)),
    "bad_words_token_ids": st.one_of(st.lists(lists, max_size=2), numbers),
    "logit_bias": maps,
    "extra_args": maps,
}


@st.composite
def odd_params(draw: st.DrawFn) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(sorted(FIELDS)), min_size=1, max_size=2, unique=True))
    return {name: draw(FIELDS[name]) for name in names}


def check_message(message: str) -> None:
    assert any(name in message for name in [*FIELDS, "bad words"]), message
    assert len(message) < 2000


@given(odd=odd_params(), base=st.sampled_from([0.0, 0.7]), is_assigned=st.booleans())
@settings(max_examples=max(300, settings().max_examples))
def check(engine: Engine, odd: dict[str, Any], base: float, is_assigned: bool) -> None:
    params = {"temperature": base, "max_tokens": None, **odd}
    try:
        if is_assigned:
            made = SamplingParams(temperature=base, max_tokens=None)
            for name, value in odd.items():
                setattr(made, name, value)
        else:
            made = SamplingParams(**params)
        engine.add_request([1, 2, 3, 4], made, "odd")
    except (ConfigError, RequestError) as error:
        check_message(str(error))
        seen["refused"] += 1
        return
    try:
        for _ in range(2):  # the prompt, and a decode
            engine.step()
        rows = list(engine.runner._rows.values())
        pack([row.controls(0) for row in rows])
        for name in odd:
            seen[name] += 1
        seen["ran"] += 1
    finally:
        engine.abort("odd")
        engine.step()
        assert engine.scheduler.manager.num_used == 0


def test_odd_parameters_are_refused_or_a_step_runs(tiny):
    config = EngineConfig(num_blocks=40, block_size=4, max_model_len=32, max_num_seqs=4)
    engine = load_engine(tiny["llama"].directory, LoadSettings(engine=config))
    # The test would prove little if nearly everything were refused.
    wanted = {"ran": 80, **dict.fromkeys(FIELDS, 1)}
    check_until_seen(lambda test: test(engine), check, seen, wanted)
