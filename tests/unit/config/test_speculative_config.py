"""Test the keys of ``speculative_config``: vLLM's, their defaults, and refusals by name."""

import pytest

from mie import EngineConfig
from mie.config.speculation import speculation_of
from mie.errors import ConfigError


def test_nothing_means_no_drafts():
    assert speculation_of(None) is None


def test_vllms_keys_are_read():
    found = speculation_of(
        {
            "method": "ngram",
            "num_speculative_tokens": 5,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 3,
        }
    )
    assert (found.method, found.num_speculative_tokens) == ("ngram", 5)
    assert (found.prompt_lookup_max, found.prompt_lookup_min) == (4, 3)
    assert speculation_of({"model": "[ngram]"}).method == "ngram"


@pytest.mark.parametrize("name", ["prompt_lookup_max", "prompt_lookup_min"])
def test_one_limit_of_the_lookup_stands_for_both(name):
    found = speculation_of({"method": "ngram", name: 3})
    assert (found.prompt_lookup_max, found.prompt_lookup_min) == (3, 3)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "must be an object; got 3"),
        ({}, "has method None; mie looks drafts up"),
        ({"method": "eagle"}, "has method 'eagle'; mie looks drafts up, and runs no draft models"),
        ({"method": "ngram", "model": "other"}, "has model 'other'; mie looks drafts up"),
        ({"method": "ngram", "ngrams": 3}, "has no key 'ngrams'; it has method, "),
        ({"method": "ngram", "num_speculative_tokens": 0}, r"num_speculative_tokens.* 1 … 64"),
        ({"method": "ngram", "num_speculative_tokens": True}, "must be an integer"),
        ({"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 3}, "in 1 … 2; got 3"),
        ({"method": "ngram", "prompt_lookup_max": "x"}, "prompt_lookup_max.*got 'x'"),
        ({"method": "ngram", "adaptive": 1}, "adaptive.*true or false; got 1"),
        ({"method": "ngram", "suffix_decoding_max_tree_depth": 5}, "needs method 'suffix'"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 2}, r"in \[0, 1\]; got 2"),
    ],
)
def test_a_wrong_value_is_refused_by_name(value, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(speculative_config=value)
