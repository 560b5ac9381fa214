"""Check that tests never wait without a deadline, so that a failure never becomes a hang."""

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
STARTS = {"run", "call", "check_call", "check_output"}
WAITS = {"wait", "join", "communicate"}


def endless_waits(source: str) -> Iterator[int]:
    """Yield the lines that start a program, or wait for another thread, without a deadline.

    A task's wait ends with the test's event loop, which has a deadline of its own.
    """
    tree = ast.parse(source)
    awaited = {node.value for node in ast.walk(tree) if isinstance(node, ast.Await)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner, name = node.func.value, node.func.attr
        is_bounded = any(each.arg in ("timeout", None) for each in node.keywords)
        starts = isinstance(owner, ast.Name) and owner.id == "subprocess" and name in STARTS
        waits = name in WAITS and not node.args and node not in awaited
        if (starts or waits) and not is_bounded:
            yield node.lineno


def test_every_wait_has_a_deadline() -> None:
    found = [
        f"{path.relative_to(TESTS)}:{line}"
        for path in sorted(TESTS.rglob("*.py"))
        for line in endless_waits(path.read_text(encoding="utf-8"))
    ]
    assert found == [], "give a timeout, or use deadlines.py"


def test_an_endless_wait_is_noticed() -> None:
    source = """
subprocess.run(command, check=True)
subprocess.run(command, timeout=9)
subprocess.run(command, **options)
process.wait()
process.wait(9)
thread.join()
thread.join(timeout=9)
" ".join(words)
await event.wait()
process.communicate()
"""
    assert [*endless_waits(source)] == [2, 5, 7, 11]
