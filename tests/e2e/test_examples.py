"""Check that each example runs unchanged, and is short."""

import re
from pathlib import Path

import pytest
from command_line import run_warm

EXAMPLES = Path(__file__).parents[2] / "examples"
README = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
MAX_LINES = 60

EXPECTED = {
    "async_streaming": r"\nPrompt: 'Once upon a time'\nAnswer: '.+'\n$",
    "basic": r"Prompt:    'One day'\nGenerated: ['\"].+",
    "batch_jsonl": r'(\{"custom_id": "story-\d", "text": ".*Nora.*"\}\n)$',
    "beam_search": r"( +log-probability +-\d+\.\d+: '.*'\n){4}Tokens computed: \d+\n$",
    "chat": r"Answer: The story is about Nora the hedgehog\.\nCached: \d+ of \d+ tokens\n",
    "classify": r"3 of 3 right\n$",
    "n_choices": r"(\[\d\] log-probability .*\n){4}The same seed gave the same texts: True\n$",
    "prefix_caching": r"10\d of 10\d tokens cached\nThe answers are the same .*: True\n$",
    "story_record": re.escape(re.findall(r'^    (\{"name": .*\})$', README, re.MULTILINE)[0]),
    "structured": r"Answer: The story is about Mia the otter\.\nAnswer: \{.*\}\nIts place: mill\n$",
    "tools": r"weather\(\{\"place\":\"mill\"\}\) = There is rain at the mill\.\nAnswer: .+\n$",
    "streaming": r"\[\d+ tokens, finish_reason='\w+'\]\n(.|\n)*unfinished requests: False\]\n$",
}
"""The last output of each example."""


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == EXPECTED.keys()


QUICK = ("async_streaming", "basic", "beam_search", "structured")


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in EXPECTED],
)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    if name in ("story_record", "structured", "tools"):
        pytest.importorskip("llguidance", reason="the extra 'structured' is not installed")
    process = run_warm(EXAMPLES / f"{name}.py", directory=tmp_path)
    assert process.returncode == 0, process.stderr.decode()
    output = process.stdout.decode()
    assert re.search(EXPECTED[name], output), output


@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_is_short_and_has_a_docstring(name: str) -> None:
    lines = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) < MAX_LINES
    assert lines[0].startswith('"""')
