"""Test the exercises: right answers pass, and each typical mistake gets its sentence."""

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from threadpoolctl import threadpool_limits
from toml_files import read_toml

from mie.cli import main
from mie.errors import ConfigError
from mie.learn import check as checking
from mie.learn.checks import CHECKS
from mie.learn.exercises import (
    Exercise,
    commands,
    exercise_of,
    exercises,
    functions,
    open_holes,
    page_without_holes,
    program,
    replaced,
)
from mie.learn.folder import RECORD, note_solved, start
from mie.learn.probe import Broken
from mie.learn.trial import Steps, Verdict, try_out

ROOT = Path(__file__).parents[3]
TABLE = ROOT / "tests/planted/lessons.toml"
MISTAKES = [
    {"step": int(step), **mistake}
    for step, mistakes in read_toml(TABLE).items()
    for mistake in mistakes
]
LEARN = ROOT / "mie/learn"
ALL = exercises()


@pytest.fixture(scope="module")
def steps() -> Iterator[Steps]:
    with threadpool_limits(1):
        yield Steps()


def changed(exercise: Exercise, old: str, new: str) -> str:
    source = exercise.solution()
    assert source.count(old) == 1, f"{exercise.name} has {old!r} {source.count(old)} times"
    return source.replace(old, new)


def verdict_of(steps: Steps, exercise: Exercise, source: str) -> Verdict:
    return try_out(steps, exercise, source, f"/learner/{exercise.name}")


# The files.


@pytest.mark.parametrize("exercise", ALL, ids=lambda each: each.name)
def test_an_exercise_is_the_tutorials_file_with_holes(exercise: Exercise):
    """Only the functions to write differ, and each has the signature of the solution."""
    text = exercise.text()
    compile(text, exercise.name, "exec")
    assert [name for name, _ in open_holes(exercise, text)] == exercise.holes
    assert open_holes(exercise, exercise.solution()) == []
    there, right = dict(functions(ast.parse(text))), dict(functions(ast.parse(exercise.solution())))
    assert [*there] == [*right]
    for name, node in right.items():
        if name in exercise.holes:
            assert ast.dump(there[name].args) == ast.dump(node.args)
            assert "Rule" in (ast.get_docstring(there[name]) or "")
        else:
            assert ast.dump(there[name]) == ast.dump(node)


@pytest.mark.parametrize("exercise", ALL, ids=lambda each: each.name)
def test_an_exercise_names_pages_and_code_that_exist(exercise: Exercise):
    text = " ".join(exercise.text().split())
    assert (ROOT / exercise.page).is_file()
    for path in re.findall(r"(?:mie|tests|docs)/[\w/]+(?:\.\w+)?", text):
        assert (ROOT / path).exists(), path
    for path, section in re.findall(r'Page: (docs/\S+\.md), "([^"]+)"', text):
        page = (ROOT / path).read_text(encoding="utf-8")
        assert f"## {section}\n" in page, section
    for path, name in re.findall(r"(mie/[\w/]+\.py), `(?:\w+\.)?(\w+)`", text):
        assert re.search(rf"\b(def|class) {name}\b", (ROOT / path).read_text(encoding="utf-8")), (
            name
        )


def test_an_exercise_is_found_by_number_name_or_path():
    for word in ("4", "step_4", "step_4.py", "lessons/step_4.py"):
        assert exercise_of(word).number == 4
    with pytest.raises(ConfigError, match=r"'step_10\.py' is not an exercise"):
        exercise_of("step_10.py")


# Right answers.


@pytest.mark.parametrize("exercise", ALL, ids=lambda each: each.name)
def test_the_solution_is_right(steps: Steps, exercise: Exercise):
    verdict = verdict_of(steps, exercise, exercise.solution())
    assert verdict.is_solved, verdict.lines
    assert "equal the oracle's" in verdict.lines[0]


@pytest.mark.parametrize("exercise", ALL, ids=lambda each: each.name)
def test_an_answer_in_other_words_passes(steps: Steps, exercise: Exercise):
    answer = ROOT / f"tests/data/learner_answers/step_{exercise.number}.txt"
    source = replaced(exercise.text(), answer.read_text(encoding="utf-8"))
    assert open_holes(exercise, source) == []
    CHECKS[exercise.number](steps.load(exercise, source, "/learner/step.py"), steps.modules)


OTHER_ANSWERS = {
    "attention in loops": (
        1,
        """    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
    weights = np.exp(np.where(visible, scores - scores.max(), -np.inf))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, v)
""",
        """    out = np.zeros(q.shape)
    for i in range(n):
        for h in range(q.shape[1]):
            seen = slice(0, s - n + i + 1)
            scores = k[seen, h] @ q[i, h] / q.shape[2] ** 0.5
            scores = np.exp(scores - max(scores))
            out[i, h] = scores / sum(scores) @ v[seen, h]
    return out
""",
    ),
    "one block at a time": (
        3,
        "        seq.table += [self.take() for _ in range(missing)]\n",
        "        while len(seq.table) * self.block_size < length:\n"
        "            seq.table.append(self.take())\n",
    ),
    "one token at a time": (
        3,
        "        self.v[layer, blocks, positions % self.block_size] = v\n",
        "        for value, p in zip(v, positions):\n"
        "            self.v[layer, seq.table[p // self.block_size], p % self.block_size] = value\n",
    ),
    "victims collected": (
        5,
        "            victim = self.running.pop()\n",
        "            victim = max(self.running, key=self.running.index)\n"
        "            self.running.remove(victim)\n",
    ),
    "known in a copy": (
        6,
        "            self.known = {tokens: b for tokens, b in self.known.items() if b != block}\n",
        "            for tokens in [t for t, b in self.known.items() if b == block]:\n"
        "                del self.known[tokens]\n",
    ),
    "a queue that is sorted after the step": (
        9,
        "        return super().schedule()\n",
        "        batch = super().schedule()\n"
        "        self.waiting.sort(key=lambda seq: self.ranks[seq.name])\n"
        "        return batch\n",
    ),
    "dequantised rows": (
        7,
        "    return (sums * scales.T[:, None]).sum(0)\n",
        "    return x @ dequantise(codes, scales).T\n",
    ),
}


@pytest.mark.parametrize("name", OTHER_ANSWERS)
def test_another_right_answer_passes(steps: Steps, name: str):
    number, old, new = OTHER_ANSWERS[name]
    exercise = ALL[number - 1]
    module = steps.load(exercise, changed(exercise, old, new), "/learner/step.py")
    CHECKS[number](module, steps.modules)


# Mistakes.


def test_there_are_forty_typical_mistakes_in_all_exercises():
    assert len({(row["step"], row["name"]) for row in MISTAKES}) == len(MISTAKES) >= 40
    assert {row["step"] for row in MISTAKES} == {*CHECKS} == {each.number for each in ALL}
    assert len({row["rule"] for row in MISTAKES}) >= 40


def test_the_table_explains_each_rule_that_a_check_names():
    rules = json.loads((LEARN / "rules.json").read_text(encoding="utf-8"))
    named, nodes = set(), []
    for path in [LEARN / "probe.py", *(LEARN / "checks").glob("*.py")]:
        nodes += ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    for node in nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "Broken",
            "self._broken",
            "driver._broken",
            "called",
        ):
            named |= {x.value for x in ast.walk(node.args[0]) if isinstance(x, ast.Constant)}
    named = {each for each in named if isinstance(each, str)}
    explained = {rule for section in rules.values() for rule in section}
    assert len(named) > 100
    assert named <= explained
    strings = {x.value for x in nodes if isinstance(x, ast.Constant)}
    assert explained <= strings
    assert {row["rule"] for row in MISTAKES} <= explained


@pytest.mark.parametrize("row", MISTAKES, ids=lambda row: f"{row['step']}: {row['name']}")
def test_a_typical_mistake_breaks_its_rule(steps: Steps, row: dict):
    exercise = ALL[row["step"] - 1]
    module = steps.load(exercise, changed(exercise, row["old"], row["new"]), "/learner/step.py")
    with pytest.raises(Broken) as caught:
        CHECKS[exercise.number](module, steps.modules)
    assert caught.value.rule == row["rule"], caught.value
    assert row["says"] in caught.value.seen


@pytest.mark.slow
@pytest.mark.parametrize("row", MISTAKES, ids=lambda row: f"{row['step']}: {row['name']}")
def test_a_typical_mistake_gets_a_report(steps: Steps, row: dict):
    exercise = ALL[row["step"] - 1]
    verdict = verdict_of(steps, exercise, changed(exercise, row["old"], row["new"]))
    assert (verdict.is_solved, verdict.rule) == (False, row["rule"])
    text = "\n".join(verdict.lines)
    assert row["says"] in text
    assert f"Rule ({row['rule']}): " in text
    assert "mie/learn" not in text


def test_a_report_has_the_token_the_table_and_the_rule(steps: Steps):
    source = changed(ALL[3], "positions += span", "positions += range(count)")
    verdict = verdict_of(steps, ALL[3], source)
    page = (ROOT / "docs/learn.md").read_text(encoding="utf-8")
    assert "\n".join(["```text", *verdict.lines, "```"]) in page
    assert f"has {len(MISTAKES)} typical mistakes" in page
    assert verdict.lines == [
        "step_4.py: a token differs from the oracle's.",
        "Request A, position 8: the token is ',', and the oracle's is ' who'. Before it: "
        "'Once there was a fox named Ruby'",
        "Block table of A then: [5, 2], with blocks of 4 tokens; 4 of 8 tokens were computed "
        "before the step.",
        "Seen: Token 5 of request A was computed at position 0 in the 2nd pass.",
        "Rule (position restarted): A token's position is its place in the whole text. A pass "
        "begins at the number of computed tokens, not at 0.",
        "Page: docs/tutorial/step_4.md",
    ]


def test_a_rare_mistake_gets_the_token_and_no_rule(steps: Steps):
    new = "np.argsort(logits[end - 1])[-2 if len(logits[0]) > 1000 and end == 2 else -1]"
    verdict = verdict_of(steps, ALL[3], changed(ALL[3], "logits[end - 1].argmax()", new))
    assert verdict.rule is None
    assert verdict.lines[0] == "step_4.py: a token differs from the oracle's."
    assert re.match(r"Request \w, position \d+: the token is ", verdict.lines[1])
    assert "The check does not know this mistake" in verdict.lines[-2]
    assert "mie learn solution 4" in verdict.lines[-2]


def test_a_failure_shows_the_learners_lines_only(steps: Steps):
    source = changed(ALL[3], "ends.append(len(tokens))", "ends.append(len(token))")
    verdict = verdict_of(steps, ALL[3], source)
    line = source.splitlines().index("        ends.append(len(token))") + 1
    assert verdict.lines[:4] == [
        "step_4.py fails.",
        f"  line {line}, in run",
        "    ends.append(len(token))",
        "  NameError: name 'token' is not defined",
    ]


def test_open_functions_are_named_and_finished_ones_are_checked(steps: Steps):
    exercise, solution = ALL[2], ALL[2].solution()
    node = dict(functions(ast.parse(solution)))["Pool.grow"]
    grow = "\n".join(solution.splitlines()[node.lineno - 1 : node.end_lineno])
    source = replaced(exercise.text(), f"class Pool:\n{grow}\n")
    verdict = verdict_of(steps, exercise, source)
    (line,) = verdict.lines
    given = "Pool.release, Pool.write, Pool.read were taken from the solution"
    assert line.startswith(f"Pool.grow is right ({given}). Next: write Pool.release (line ")
    assert verdict.right == ["Pool.grow"]
    wrong = source.replace("-(-length // self.block_size)", "length // self.block_size")
    verdict = verdict_of(steps, exercise, wrong)
    assert verdict.lines[0] == "step_3.py breaks a rule."
    assert verdict.rule == "too few blocks"
    assert "step_3.py has 3 of 4 functions to write" in verdict.lines[3]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def run(:", "step_4.py is not Python: line 1: "),
        ("import absent_module", "step_4.py cannot be loaded."),
        ("run = 3", "step_4.py has no run and no show; keep the given names."),
    ],
)
def test_a_file_that_cannot_be_tried(steps: Steps, source: str, says: str):
    verdict = verdict_of(steps, ALL[3], source)
    assert verdict.lines[0].startswith(says)
    assert not verdict.is_solved


# The process and the command.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert main(["learn", "start", str(tmp_path / "lessons")]) == 0
    return tmp_path / "lessons"


def test_start_writes_nine_files_and_keeps_work(folder: Path, capsys):
    assert sorted(path.name for path in folder.iterdir()) == [each.name for each in ALL]
    (folder / "step_2.py").write_text("my work")
    (folder / "step_5.py").unlink()
    capsys.readouterr()
    assert main(["learn", "start", str(folder)]) == 0
    assert (
        "1 exercise written, 8 files left as they were\nNext: mie learn next"
        in capsys.readouterr().out
    )
    assert (folder / "step_2.py").read_text() == "my work"
    check, run = commands(folder / "step_5.py")
    assert check == f"mie learn check {folder / 'step_5.py'}"
    head, _, rest = (
        ALL[4].text().partition("Check:  mie learn check step_5.py\nRun:    python step_5.py")
    )
    text = (folder / "step_5.py").read_text()
    assert text == f"{head}Check:  {check}\nRun:    {run}{rest}"


def test_a_right_answer_is_noted_until_it_changes(folder: Path, capsys):
    path = folder / "step_3.py"
    path.write_text(ALL[2].solution() + "\nprint('hello')\n")
    assert main(["learn", "check", str(path)]) == 0
    out = capsys.readouterr().out
    assert "It printed:\n  hello\n" in out
    assert "step_3.py is right." in out
    assert f"Go on with: mie learn next {folder}\n" in out
    assert main(["learn", "status", str(folder)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"step_3.py +blocks and tables +solved\n", out)
    assert out.endswith("1 of 9 solved\n")
    path.write_text(path.read_text() + "# more\n")
    main(["learn", "status", str(folder)])
    assert "changed since it was solved" in capsys.readouterr().out


def test_next_is_the_first_that_is_not_solved(folder: Path, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    for each in ALL:
        capsys.readouterr()
        assert main(["learn", "next"]) == 0
        assert f"Exercise {each.number}: {each.title}" in capsys.readouterr().out
        record = json.loads((folder / RECORD).read_text()) if each.number > 1 else {}
        note_solved(folder / each.name)
        assert len(json.loads((folder / RECORD).read_text())) == len(record) + 1
    assert main(["learn", "next"]) == 0
    assert "All nine exercises are solved" in capsys.readouterr().out


def test_hints_and_solutions_are_printed(capsys):
    assert main(["learn", "hint", "step_6.py"]) == 0
    out = capsys.readouterr().out
    assert "SharingPool.grow\n  - index = " in out
    assert "Copy while the old block" not in out
    assert "more: mie learn hint 6 SharingPool.grow\n" in out
    assert main(["learn", "hint", "6", "grow"]) == 0
    assert "Copy while the old block" in capsys.readouterr().out
    assert main(["learn", "hint", "6", "shrink"]) == 2
    assert "'shrink' is not one of SharingPool.drop" in capsys.readouterr().err
    assert main(["learn", "solution", "6"]) == 0
    assert capsys.readouterr().out == ALL[5].solution()


def test_a_folder_without_exercises_is_refused(tmp_path: Path, capsys):
    (tmp_path / "README.md").write_text("")
    for words, says in (
        (["next", str(tmp_path)], f"has no exercises; mie learn start {tmp_path}/lessons"),
        (["status", str(tmp_path / "README.md")], f"is a file; its folder is {tmp_path}"),
        (["start", str(tmp_path / "README.md")], "is a file; name a folder"),
        (["start", ""], "the folder has no name"),
    ):
        assert main(["learn", *words]) == 2
        assert says in capsys.readouterr().err
    start(tmp_path / "lessons")
    capsys.readouterr()
    assert main(["learn", "next", str(tmp_path)]) == 0
    assert f"  file   {tmp_path}/lessons/step_1.py" in capsys.readouterr().out
    assert main(["learn", "check", str(tmp_path / "step_1.py")]) == 2
    assert "does not exist; mie learn start DIR writes" in capsys.readouterr().err
    assert main(["learn", "check", "step_1.py", "--timeout", "0"]) == 2
    assert "--timeout must be more than 0; got 0" in capsys.readouterr().err


def test_one_function_alone_is_a_first_success(folder: Path, capsys, monkeypatch):
    monkeypatch.chdir(folder.parent)
    path, exercise = folder / "step_1.py", ALL[0]
    node = dict(functions(ast.parse(exercise.solution())))["generate"]
    body = exercise.solution().splitlines()[node.lineno - 1 : node.end_lineno]
    path.write_text(replaced(exercise.text(), "\n".join(body)))
    for word in ("1", "step_1.py"):
        capsys.readouterr()
        assert main(["learn", "check", word]) == 1
        said = "generate is right (attention was taken from the solution). Next: write attention"
        assert capsys.readouterr().out.startswith(said)
    main(["learn", "status", "lessons"])
    assert "1 of 2 to write; right: generate\n" in capsys.readouterr().out
    path.write_text(path.read_text().replace("return tokens", "return list(prompt)"))
    assert main(["learn", "check", "1"]) == 1
    assert "Rule (number of tokens)" in capsys.readouterr().out


def test_a_page_is_read_without_its_solution(capsys):
    for each in ALL:
        assert main(["learn", "read", str(each.number)]) == 0
        out = capsys.readouterr().out
        for hole in each.holes:
            assert f"def {hole.rpartition('.')[2]}(...):  # you write this function\n" in out
        page = (ROOT / each.page).read_text(encoding="utf-8")
        assert re.findall("^#.*", out, re.M) == re.findall("^#.*", page, re.M)
        assert out.count("```") == page.count("```")
    assert "np.einsum" not in page_without_holes(ALL[0])


def test_commands_are_printed_as_mie_was_called(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    for called, says in (
        ("bin/mie", "bin/mie"),
        ("/src/mie/__main__.py", f"{sys.executable} -m mie"),
        ("/bin/pytest", "mie"),
    ):
        monkeypatch.setattr(sys, "argv", [called])
        assert program() == says


def test_files_that_are_not_exercises_are_described(folder: Path, capsys):
    (folder / "step_2.py").write_text("")
    (folder / "step_3.py").write_bytes(b"# \xff")
    (folder / "step_1.py").write_text(ALL[0].solution().replace("class Model", "class Llama"))
    for number, says in (
        ("1", "step_1.py has no Model; keep the given names."),
        ("3", "step_3.py is not UTF-8: invalid start byte at 2."),
    ):
        assert main(["learn", "check", str(folder / f"step_{number}.py")]) == 1
        assert says in capsys.readouterr().out
    main(["learn", "status", str(folder)])
    states = capsys.readouterr().out
    assert "2 functions are missing" in states
    assert "not UTF-8" in states


LOOP = "\n    while True:\n        count = 0\n"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (LOOP, "step_2.py is still computing after 1 s. It was here:"),
        ("\n    import os; os._exit(0)\n", "step_2.py ended Python before the check was over."),
        ("\n    import os; os.abort()\n", "step_2.py was ended by signal SIGABRT."),
        ("\n    raise SystemExit\n", "step_2.py ends Python."),
        ("\n    breakpoint()\n", "BdbQuit: a check has no debugger"),
    ],
    ids=["a loop", "an exit", "an abort", "a quiet exit", "a breakpoint"],
)
def test_the_check_survives_a_file(folder: Path, capsys, body: str, says: str):
    path = folder / "step_2.py"
    head = "def generate(model, prompt, count):"
    path.write_text(changed(ALL[1], head, head + body))
    assert main(["learn", "check", str(path), "--timeout", "1"]) == 1
    out = capsys.readouterr()
    assert says in out.out
    assert "Traceback" not in out.out + out.err


def test_a_loop_that_catches_everything_is_ended(folder: Path, monkeypatch):
    monkeypatch.setattr(checking, "PATIENCE", 1.0)
    path = folder / "step_2.py"
    path.write_text("while True:\n    try:\n        import time; time.sleep(9)\n    except: pass\n")
    verdict = checking.check(path, 0.5)
    assert verdict["lines"][0] == "step_2.py was ended: it did not stop 0.5 s after it began."
