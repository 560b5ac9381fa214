"""`mie serve` on the command line: its help, its defaults, and its packages."""

import argparse
from pathlib import Path
from typing import Any

import pytest
from command_line import python

import mie
from mie.cli import main, new_parser
from mie.cli.serve import engine_settings
from mie.config.settings import settings_of
from mie.errors import ConfigError
from mie.serve.config import ServeConfig

ROOT = Path(mie.__file__).parent.parent


def settings(*words: str) -> dict[str, Any]:
    args: argparse.Namespace = new_parser().parse_args(["serve", *words])
    return engine_settings(args)


def test_the_help_says_what_every_option_does(capsys):
    assert main(["serve", "--help-all"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for name, default, declared in settings_of(ServeConfig):
        if declared.kind != "object":
            assert f"--{name.replace('_', '-')}" in text
            assert declared.help.split(";")[0] in text.replace("- ", "-"), name
            assert default is None or declared.default_text or "(default: " in text
    for name in ("--api-key", "--served-model-name", "--allowed-origins", "--config", "--trace"):
        assert name in text


def test_the_help_names_the_servers_own_defaults(capsys):
    main(["serve", "--help-all"])
    text = " ".join(capsys.readouterr().out.split())
    for option, default in (
        ("--generation-config NAME", "auto"),
        ("--scheduling-policy NAME", "fair"),
        ("--batch-invariant, --no-batch-invariant", "on where the backend keeps it"),
    ):
        _, _, after = text.rpartition(option)
        assert after.partition("default: ")[2].startswith(default)


def test_the_model_is_given_once():
    assert settings()["model"] == "bundled"
    assert settings("./a")["model"] == "./a"
    assert settings("--model", "./a")["model"] == "./a"
    assert settings("./a", "--model", "./a")["model"] == "./a"
    with pytest.raises(ConfigError, match="give one of them"):
        settings("./a", "--model", "./b")


def test_the_servers_own_defaults():
    own = {"scheduling_policy": "fair", "batch_invariant": True, "reasoning_parser": "auto"}
    assert settings() == {"model": "bundled", **own}
    given = settings(
        *("--generation-config", "vllm", "--scheduling-policy", "fcfs", "--no-batch-invariant"),
        *("--reasoning-parser", "qwen3", "--tool-call-parser", "hermes"),
        "--enable-auto-tool-choice",
    )
    assert given.pop("enable_auto_tool_choice") is True  # vLLM's, without effect
    assert given == {
        "model": "bundled",
        "reasoning_parser": "qwen3",
        "tool_call_parser": "hermes",
        "generation_config": "vllm",
        "scheduling_policy": "fcfs",
        "batch_invariant": False,
    }


@pytest.mark.parametrize("words", [["--backend", "cupy"], ["--backend", "cupy-emulated"]])
def test_bits_are_not_promised_where_they_cannot_be_kept(words):
    assert "batch_invariant" not in settings(*words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port", "70000"], "port must be an integer"),
        (["--max-logprobs", "-2"], "max_logprobs must be"),
        (["--max-num-seqs", "0"], "max_num_seqs must be"),
        (["--hots", "x"], "did you mean --host?"),
        (["./no-such-model"], "no-such-model"),
        (["--uds", "mie.sock", "--port", "0"], "--uds is given with --host or --port"),
        ("max_num_seq: 3", "has no parameter '--max-num-seq'; did you mean '--max-num-seqs'?"),
        ("- a\n- b", "must have lines such as 'port: 9000'"),
        ("port: [", "cannot read"),
        ("port: true", "port is True in the file, and needs a value"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(capsys, tmp_path, words, message):
    """A text stands for the file of --config."""
    if isinstance(words, str):
        (tmp_path / "mie.yaml").write_text(words)
        words = ["--config", str(tmp_path / "mie.yaml")]
    assert main(["serve", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize("options", [[], ["--config", "mie.yaml"]])
def test_without_the_extra_it_says_what_to_install(options):
    """In a Python that has none of the packages of the extra."""
    code = """
import sys
for name in ("starlette", "uvicorn", "pydantic", "prometheus_client", "yaml"):
    sys.modules[name] = None
from mie.cli import main
sys.exit(main(["serve", *sys.argv[1:]]))
"""
    result = python("-c", code, *options, code=2, cwd=ROOT)
    assert "pip install starlette uvicorn" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_demo_has_a_small_pool_where_none_is_given():
    found = settings("--demo")
    assert (found["num_blocks"], found["block_size"], found["max_num_seqs"]) == (48, 8, 6)
    assert settings("--demo", "--num-blocks", "99")["num_blocks"] == 99
    assert "num_blocks" not in settings()
