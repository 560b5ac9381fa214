"""Change the solutions of the exercises in one place, and expect that each change is noticed."""

import ast
import copy
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from threadpoolctl import threadpool_limits

from mie.learn.checks import CHECKS
from mie.learn.exercises import Exercise, exercises, functions
from mie.learn.trial import Steps, try_out

PATIENCE = 5.0
"""Seconds after which a changed solution counts as an endless loop, which the command reports."""

OTHERS: dict[type, list[type]] = {
    ast.Lt: [ast.LtE, ast.Gt],
    ast.LtE: [ast.Lt],
    ast.Gt: [ast.GtE, ast.Lt],
    ast.Eq: [ast.NotEq],
    ast.Is: [ast.IsNot],
    ast.In: [ast.NotIn],
    ast.Add: [ast.Sub],
    ast.Sub: [ast.Add],
    ast.Mult: [ast.Add],
    ast.FloorDiv: [ast.Mod],
    ast.Mod: [ast.FloorDiv],
    ast.Div: [ast.Mult],
}

EQUAL = {
    "x.reshape(-2, *x.shape[2:])[:length]",  # NumPy takes any negative size
    "weight.reshape(len(weight), -2, GROUP)",
    "codes.reshape(len(codes), -2, GROUP)",
    "x.reshape(len(x), -2, GROUP)",
    "strict=False",
    "[*seq.tokens[:-1], token], 1)",  # the next line sets max_tokens
    "[*seq.tokens[:-1], token], -1)",
    "np.where(scales == 0, 2, scales)",  # 0 / 2 is 0 too
    "longest=5",
    "longest=3",  # a default, which the exercise gives
    "len(tokens) - 1), -1, -1)",  # a run of no tokens is the whole text, which never repeats
    "len(tokens) + 1), 0, -1)",
    "len(tokens) - 0), 0, -1)",
    "size - 1, -2, -1)",  # tokens[-1:] is too short
    "argmax(+1)",  # the last of two axes
}
"""Parts of changed lines that compute the same."""


class Loop(BaseException):
    """A changed solution does not end."""


@contextmanager
def deadline() -> Iterator[None]:
    def late(*_: Any) -> None:
        raise Loop

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def changes(node: ast.AST) -> Iterator[Callable[[Any], None]]:
    """Yield functions that change a node of this kind in place."""
    if isinstance(node, ast.Compare):
        for other in OTHERS.get(type(node.ops[0]), []):
            yield lambda n, other=other: n.ops.__setitem__(0, other())
    elif isinstance(node, ast.BinOp):
        for other in OTHERS.get(type(node.op), []):
            yield lambda n, other=other: setattr(n, "op", other())
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        for by in (1, -1):
            yield lambda n, by=by: setattr(n, "value", n.value + by)
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield lambda n: setattr(n, "value", not n.value)
    elif isinstance(node, ast.BoolOp):
        for index in range(len(node.values)):
            yield lambda n, index=index: n.values.pop(index)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield lambda n: setattr(n, "op", ast.UAdd())
    elif isinstance(node, ast.Slice):
        for end in ("lower", "upper"):
            if getattr(node, end) is not None:
                yield lambda n, end=end: setattr(n, end, None)
    if isinstance(getattr(node, "body", None), list):
        for index, line in enumerate(node.body):
            if not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)):
                yield lambda n, index=index: n.body.__setitem__(index, ast.Pass())


def mutants(exercise: Exercise) -> Iterator[tuple[str, str]]:
    """Yield (source, changed part) for each change of a function that a learner writes."""
    source = exercise.solution()
    lines, there = source.splitlines(), dict(functions(ast.parse(source)))
    for function in (there[hole] for hole in exercise.holes):
        plain, seen = ast.unparse(function), set()
        for index, node in enumerate(ast.walk(function)):
            for change in changes(node):
                changed = copy.deepcopy(function)
                change([*ast.walk(changed)][index])
                text = ast.unparse(ast.fix_missing_locations(changed))
                if text != plain and text not in seen:
                    seen.add(text)
                    new = [" " * function.col_offset + line for line in text.splitlines()]
                    whole = [*lines[: function.lineno - 1], *new, *lines[function.end_lineno :]]
                    part = {*text.splitlines()} - {*plain.splitlines()}
                    yield "\n".join(whole) + "\n", "; ".join(map(str.strip, part)) or text


def solves(steps: Steps, exercise: Exercise, source: str) -> bool:
    """Return whether a source keeps all rules, and writes the right tokens."""
    try:
        module = steps.load(exercise, source, exercise.name)
        CHECKS[exercise.number](module, steps.modules)
    except Exception:
        return False
    return try_out(steps, exercise, source, exercise.name).is_solved


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("exercise", exercises(), ids=lambda each: each.name)
def test_no_change_of_a_solution_counts_as_solved(exercise: Exercise):
    unnoticed, num_tried = [], 0
    with threadpool_limits(1):
        steps = Steps()
        for source, part in mutants(exercise):
            num_tried += 1
            try:
                with deadline():
                    is_solved = solves(steps, exercise, source)
            except Loop:
                continue
            if is_solved and not any(each in part for each in EQUAL):
                unnoticed.append(part)
    assert unnoticed == []
    assert num_tried >= 8
