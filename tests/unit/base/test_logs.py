"""Test that logging follows the rules for libraries, and the warnings of preemptions."""

import logging
import os
import subprocess

import pytest
from command_line import python

from mie import LLM, SamplingParams


def started(code: str, level: str) -> subprocess.CompletedProcess[str]:
    return python("-c", code, env={**os.environ, "MIE_LOGGING_LEVEL": level})


def test_importing_installs_nothing_but_a_null_handler() -> None:
    code = """
import logging, mie
logger = logging.getLogger("mie")
assert [type(each) for each in logger.handlers] == [logging.NullHandler]
assert (logger.level, logger.getEffectiveLevel()) == (logging.NOTSET, logging.WARNING)
assert not logging.getLogger().handlers
logger.error("not shown")
"""
    assert started(code, "").stderr == ""


def test_the_variable_sets_the_level() -> None:
    code = "import logging, mie; print(logging.getLogger('mie.load.engine').getEffectiveLevel())"
    assert started(code, "debug").stdout == f"{logging.DEBUG}\n"
    process = started(code, "loud")
    assert process.stdout == f"{logging.WARNING}\n"
    assert "MIE_LOGGING_LEVEL must be one of DEBUG, INFO" in process.stderr


def test_loading_logs_the_model_the_time_and_the_memory(tiny, caplog) -> None:
    directory = tiny["llama"].directory
    with caplog.at_level(logging.INFO, logger="mie"):
        LLM(directory, backend="numpy", skip_tokenizer_init=True, num_blocks=9, max_model_len=99)
    chosen, settings, loaded, pool, memory = [record.getMessage() for record in caplog.records]
    assert {record.name for record in caplog.records} == {"mie.load.engine"}
    assert chosen == "backend numpy"
    assert pool.startswith("the KV cache has 9 blocks")
    effective = "EngineConfig(max_model_len=99, num_blocks=9, async_scheduling=False)"
    assert settings == f"settings of the engine: {effective}"
    assert loaded.startswith(f"loaded {directory} on numpy in ")
    assert "KV cache, 9 blocks of 16 tokens" in memory


def test_preemptions_cause_a_warning(tiny, caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM(
        tiny["llama"].directory,
        skip_tokenizer_init=True,
        num_blocks=6,
        block_size=4,
        max_model_len=24,
    )
    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    llm.generate([[1, 2, 3], [4, 5, 6], [7, 8, 9]], params, use_tqdm=False)
    assert llm.engine.stats.num_preemptions > 1
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("mie.engine.engine", logging.WARNING)
    assert "raise num_blocks" in record.getMessage()
