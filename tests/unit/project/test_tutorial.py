"""Check that all steps of the tutorial give the same tokens, and that its pages show the code."""

import importlib
import random
import re
import runpy
import sys
from pathlib import Path
from types import ModuleType

import naive
import numpy as np
import pytest

from mie import LLM, SamplingParams

FOLDER = Path(__file__).parents[3] / "docs" / "tutorial"
NUMBERS = range(1, 10)
PROMPTS = [[5, 6, 7, 8, 9, 1, 2], [5, 6, 7, 8, 4], [11], [5, 6, 7, 8, 9, 1, 2, 3, 30, 31]]
COUNT = 9


class Steps:
    """The tutorial's modules, a tiny model, and the oracle's answers for it."""

    def __init__(self, modules: dict[int, ModuleType], tiny) -> None:
        self.modules = modules
        self.tiny = tiny
        self.model = modules[1].Model(tiny.config, tiny.weights)

    def expected(self, prompt: list[int], count: int = COUNT) -> list[int]:
        greedy = {"temperature": 0, "max_tokens": count}
        output, _, _ = naive.generate(self.tiny.config, self.tiny.weights, prompt, greedy)
        return prompt + output

    def sequences(self) -> list:
        return [self.modules[3].Sequence(str(i), p, COUNT) for i, p in enumerate(PROMPTS)]

    def complete(self, engine, arrivals: list) -> None:
        """Run an engine until all sequences are done, with one arriving per step."""
        while arrivals or engine.waiting or engine.running:
            if arrivals:
                engine.add(arrivals.pop(0))
            batch = engine.step()
            assert sum(count for _, count in batch) <= engine.budget
            assert batch, "a step without work"


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch, tiny) -> Steps:
    monkeypatch.syspath_prepend(str(FOLDER))
    modules = {n: importlib.import_module(f"step_{n}") for n in NUMBERS}
    for name in [f"step_{n}" for n in NUMBERS]:
        monkeypatch.delitem(sys.modules, name)
    return Steps(modules, tiny["llama"])


@pytest.mark.parametrize("prompt", PROMPTS)
def test_steps_1_to_3_give_the_oracles_tokens(steps: Steps, prompt: list[int]):
    expected = steps.expected(prompt)
    assert steps.modules[1].generate(steps.model, prompt, COUNT) == expected
    assert steps.modules[2].generate(steps.model, prompt, COUNT) == expected
    pool = steps.modules[3].Pool(steps.model, num_blocks=10, block_size=2)
    random.Random(0).shuffle(pool.free)
    seq = steps.modules[3].Sequence("A", prompt, COUNT)
    assert steps.modules[3].generate(steps.model, pool, seq) == expected


def test_step_4_gives_each_sequence_the_same_tokens_as_alone(steps: Steps):
    pool = steps.modules[3].Pool(steps.model, num_blocks=40, block_size=3)
    seqs, rng = steps.sequences(), random.Random(0)
    while unfinished := [seq for seq in seqs if len(seq.tokens) < seq.max_tokens]:
        chosen = rng.sample(unfinished, rng.randint(1, len(unfinished)))
        batch = [(seq, rng.randint(1, len(seq.tokens) - seq.num_computed)) for seq in chosen]
        assert all(pool.grow(seq, seq.num_computed + count) for seq, count in batch)
        steps.modules[4].run(steps.model, pool, batch)
    assert [seq.tokens for seq in seqs] == [steps.expected(prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("budget", [1, 3, 40])
@pytest.mark.parametrize("num_blocks", [9, 12, 40])
@pytest.mark.parametrize("number", [5, 6, 9])
def test_engines_give_the_same_tokens_with_any_amount_of_memory(
    steps: Steps, number: int, num_blocks: int, budget: int
):
    pools = {6: steps.modules[6].SharingPool}
    names = {5: "Engine", 6: "SharingEngine", 9: "ShortestFirst"}
    engine_class = getattr(steps.modules[number], names[number])
    pool = pools.get(number, steps.modules[3].Pool)(steps.model, num_blocks, block_size=2)
    seqs = steps.sequences()
    steps.complete(engine_class(steps.model, pool, budget), list(seqs))
    assert [seq.tokens for seq in seqs] == [steps.expected(prompt) for prompt in PROMPTS]
    assert sorted(pool.free) == list(range(num_blocks))


@pytest.mark.parametrize("bits", [4, 8])
def test_step_7_gives_the_logits_of_the_dequantised_weights(steps: Steps, bits: int):
    step = steps.modules[7]
    model, tokens = steps.modules[1].load(), [0, 5, 6, 7]
    small = step.QuantisedModel(model, bits)
    wide = {name: step.dequantise(*packed) for name, packed in small.packed.items()}
    for name, weight in wide.items():
        half_a_scale = small.packed[name][1].repeat(step.GROUP, 1) / 2
        assert (np.abs(weight - model.weights[name]) <= half_a_scale + 1e-12).all()
    same = steps.modules[1].Model(model.config, {**small.weights, **wide})

    def attend(layer, q, k, v):
        return steps.modules[1].attention(q, k, v)

    logits = [each.forward(tokens, range(4), attend) for each in (small, same)]
    np.testing.assert_allclose(*logits, rtol=0, atol=1e-9)


@pytest.mark.parametrize("most", [0, 1, 4])
def test_step_8_gives_the_same_tokens_with_drafts(steps: Steps, most: int):
    for prompt in PROMPTS:
        pool = steps.modules[3].Pool(steps.model, num_blocks=14, block_size=2)
        seq = steps.modules[3].Sequence("A", prompt * 2, COUNT)
        taken = steps.modules[8].generate(steps.model, pool, seq, most)
        assert seq.tokens == steps.expected(prompt * 2)
        assert len(taken) + sum(right for _, right in taken) == COUNT
        assert len(seq.table) == -(-seq.num_computed // 2)


def test_the_engine_generates_the_text_on_the_first_page(steps: Steps):
    step = steps.modules[1]
    prompt = step.encode("Once there was a fox named Ruby")
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    llm = LLM("bundled", dtype="float64", num_blocks=8)
    [output] = llm.generate([prompt], greedy, use_tqdm=False)
    assert (
        list(output.outputs[0].token_ids) == step.generate(step.load(), prompt, 24)[len(prompt) :]
    )
    assert step.decode(prompt) + output.outputs[0].text in page(1)


# The pages.


def page(number: int) -> str:
    return (FOLDER / f"step_{number}.md").read_text()


def blocks(number: int, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page(number), re.DOTALL | re.MULTILINE)


def code_lines(text: str) -> list[str]:
    """Return the lines without indentation, because pages show methods outside their class."""
    return [line.strip() for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_pages_code_is_its_file_from_top_to_bottom(number: int):
    source = (FOLDER / f"step_{number}.py").read_text()
    assert code_lines("".join(blocks(number, "python"))) == code_lines(source)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_page_shows_the_output_of_its_file(number, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    path = FOLDER / f"step_{number}.py"
    before = set(sys.modules)
    runpy.run_path(str(path), run_name="__main__")
    for name in set(sys.modules) - before:
        if name.startswith("step_"):
            monkeypatch.delitem(sys.modules, name)
    [shown] = blocks(number, "console")
    assert shown == f"$ python docs/tutorial/step_{number}.py\n" + capsys.readouterr().out


def test_the_pages_quote_words_of_their_output() -> None:
    """Step 3 quotes the last token, and step 4 shows a step of the output as arrays."""
    text = (FOLDER / "step_3.md").read_text(encoding="utf-8")
    [quoted] = re.findall(r'The last token, "(.*)", is in no block', text)
    assert blocks(3, "console").pop().splitlines()[1].split()[-1] == quoted
    text = (FOLDER / "step_4.md").read_text(encoding="utf-8")
    [words] = re.findall(r"^    tokens +(.*)$", text, re.MULTILINE)
    [numbers] = re.findall(r"^    positions +(.*)$", text, re.MULTILINE)
    shown = blocks(4, "console").pop().splitlines()[3].split()
    pairs = [each[1:].split(":") for each in shown]
    assert pairs == [list(pair) for pair in zip(numbers.split(), words.split(), strict=True)]
