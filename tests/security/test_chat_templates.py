"""Check that hostile chat templates are refused at a cost of at most a second and 200 MB.

The worker that renders them serves threads and forks, and always ends with its parent.
"""

import linecache
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from audit import is_renderer_locked, render_worker
from command_line import python
from deadlines import join
from forks import assert_ends
from measured import Zygote

from mie.base import worker
from mie.errors import ChatTemplateError, WorkerError
from mie.text import renderer
from mie.text.chat import ChatTemplate
from mie.text.renderer import TemplateRenderer

HELLO = [{"role": "user", "content": "hello"}]
MEGABYTE = "{% set s = 'a' * 1000000 %}"
NAMESPACES = "{% set ns = namespace(x='a' * 1000000) %}"
RUNAWAYS = {
    "rfind": "{{ ('a'*2000000).rfind('ab'+'a'*1000000) }}",
    "strip": "{{ ('ā'*1000000).strip('ȁ'*1000000+'ā') }}",
    "unique": NAMESPACES + "{{ ([ns]*50000)|unique(attribute='x')|list }}",
    "sort by attributes": "{% set ns = namespace(x=('a' * 1000000)) %}"
    "{{ ([ns]*90000)|sort(attribute='x') }}",
    "format with a nested key": "{{ '%(a(b))1000000000d'|format(**{'a(b)': 1}) }}",
    "a macro's long name": "{% macro " + "m" * 60_000 + "() %}{% endmacro %}"
    "{% for i in range(9000) %}{{ " + "m" * 60_000 + " }}{% endfor %}",
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    "{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}"
    "{{ f(99) }}",
    "repetition": "{{ 'a' * 10**10 }}",
    "doubling": "{% set n = namespace(s='a') %}{% for i in range(99) %}"
    "{% set n.s = n.s ~ n.s %}{% endfor %}",
    "a power while rendering": "{% set n = messages|length + 8 %}{{ n ** 99999999 % 7 }}",
    "to_bytes": "{{ (1).to_bytes(10**10, 'big') }}",
    "format, width as argument": "{{ '{:>{}}'.format(1, 10**10) }}",
    "replace": MEGABYTE + "{{ s.replace('a', s) }}",
    "tojson": "{{ ([[[[1] * 99] * 99] * 99] * 99) | tojson(indent=99) }}",
    "much text": MEGABYTE + "{{ s }}" * 9,
}
STOPPED = ("was stopped", "did not end", "rendered too long a prompt")


# Each takes all of its CPU time, so `make test` tries every fourth.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if number % 4 else [])
        for number, name in enumerate(RUNAWAYS)
    ],
)
def test_a_runaway_template_is_stopped(name: str, zygote: Zygote) -> None:
    result = zygote.run("render", RUNAWAYS[name])
    result.check_refused("the chat template")
    assert any(word in result.message for word in STOPPED), result


COMPILED = {
    "many expressions": "{{ 1 }}" * 18_000,
    "many blocks": "{% if a %}" * 6_000 + "{% endif %}" * 6_000,
    "deep parentheses": "{{ " + "(" * 60_000 + ")" * 60_000 + " }}",
    "a long literal": "{{ " + "1" * 120_000 + " }}",
    "a chain of filters": "{{ x" + "|e" * 60_000 + " }}",
    "a comment that does not end": "{#" * 60_000,
    "too long": "{{ 1 }}" * 150_000,
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if number % 3 else [])
        for number, name in enumerate(COMPILED)
    ],
)
def test_a_template_that_is_hard_to_compile_costs_little(name: str, zygote: Zygote) -> None:
    result = zygote.run("render", COMPILED[name])
    result.check_cost()
    harmless = {"many expressions", "many additions", "a chain of filters", "many blocks"}
    if name not in harmless or result.error:  # a fast machine compiles some of them in time
        result.check_refused("the chat template")


ESCAPES = {
    "class": "{{ ''.__class__.__mro__ }}",
    "attr": "{{ ''|attr('__class__')|attr('__mro__') }}",
    "format through attr": "{{ ('{0.__globals__}'|attr('format'))(raise_exception) }}",
    "format": "{{ '{0.__globals__}'.format(raise_exception) }}",
    "globals of a function": "{{ strftime_now.__globals__ }}",
    "append": "{{ messages.append(1) }}",
    "control characters": "{{ raise_exception('\x1b]0;owned\x07\r\n\u202eabc\x9b2J') }}",
    "a long refusal": "{{ raise_exception('x' * 1000000) }}",
    "a wide year": "{{ strftime_now('%1000000000Y' * 9) }}",
    "include": "{% include '/etc/passwd' %}",
}


@pytest.mark.parametrize("name", ESCAPES)
def test_a_template_has_no_access_to_python(name: str, zygote: Zygote) -> None:
    result = zygote.run("render", ESCAPES[name])
    result.check_cost()
    for secret in ("TemplateError'", "builtin", "/usr", "root:", "<class"):
        assert secret not in result.message + result.stdout
    if result.stdout or result.error:  # Undefined values render as nothing.
        result.check_refused()


@pytest.mark.parametrize(
    "template",
    ["{{ " + "(" * 60_000, "{% for m in messages %}" * 4000 + "{% endfor %}" * 4000],
    ids=["hard", "deep"],
)
def test_detecting_the_content_format_is_limited(template: str, zygote: Zygote) -> None:
    zygote.run("content_format", template).check_refused("the chat template")


# The worker


@pytest.fixture
def own() -> Any:
    renderer = TemplateRenderer()
    yield renderer
    renderer.close()


def hello(own: TemplateRenderer, template: str = "{{ messages[0].content }}") -> str:
    return ChatTemplate(template, renderer=own).render(HELLO)


def worker_pid(own: TemplateRenderer) -> int:
    worker = render_worker(own)
    assert worker is not None
    return worker.pid


def test_the_worker_is_replaced_only_after_a_limit(own: TemplateRenderer) -> None:
    assert hello(own) == "hello"
    first = worker_pid(own)
    with pytest.raises(ChatTemplateError, match=r"is not a jinja2 template"):
        hello(own, "{{")
    assert hello(own) == "hello"
    assert worker_pid(own) == first
    with pytest.raises(ChatTemplateError, match="more than 128 MiB of memory"):
        hello(own, RUNAWAYS["repetition"])
    assert hello(own) == "hello"
    assert worker_pid(own) != first


def test_a_worker_that_was_killed_is_replaced(own: TemplateRenderer) -> None:
    hello(own)
    os.kill(worker_pid(own), signal.SIGKILL)
    os.waitid(os.P_PID, worker_pid(own), os.WEXITED | os.WNOWAIT)
    assert hello(own) == "hello"


def test_a_worker_that_hangs_is_replaced(own, monkeypatch) -> None:
    hello(own)
    stopped = worker_pid(own)
    os.kill(stopped, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(renderer, "WALL_SECONDS", 0.2)
        with pytest.raises(WorkerError, match=r"did not answer for 0\.2 s and was replaced"):
            hello(own)
    with pytest.raises(ProcessLookupError):
        os.kill(stopped, 0)
    assert hello(own) == "hello"


def test_many_threads_share_one_worker(own: TemplateRenderer) -> None:
    results: dict[int, str] = {}

    def run(number: int) -> None:
        template = ChatTemplate("{{ x }}:{{ messages[0].content }}", renderer=own)
        results[number] = "".join(template.render(HELLO, x=number) for _ in range(20))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    join(*threads)
    assert results == {number: f"{number}:hello" * 20 for number in range(8)}


FORK = """
import os, threading
from mie.text.chat import ChatTemplate
from mie.text.renderer import TemplateRenderer
own = TemplateRenderer()

def hello():
    template = ChatTemplate("{{ messages[0].content }}", renderer=own)
    assert template.render([{"role": "user", "content": "hello"}]) == "hello"
    return own._worker.pid

parents = hello()
own._lock.acquire()  # as if another thread were rendering
child = os.fork()
if child == 0:
    assert hello() != parents
    raise SystemExit(0)  # which ends its own worker, and not the parent's
own._lock.release()
assert os.waitpid(child, 0)[1] == 0
assert hello() == parents
print("done")
"""


def test_a_forked_child_starts_its_own_worker() -> None:
    assert run_script(FORK) == ["done"]


@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_an_interrupt_at_any_line_leaves_the_renderer_usable(own, stride) -> None:
    def interrupt_at(wanted: int) -> bool:
        """Interrupt the renderer at a line, and return whether it has that line."""
        lines = 0

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal lines
            name = frame.f_code.co_filename
            if name not in (renderer.__file__, worker.__file__):
                return None
            line = linecache.getline(name, frame.f_lineno)
            # A signal cannot arrive between the body of a with and its end, but a tracer can.
            if event == "line" and not line.lstrip().startswith("with "):
                lines += 1
                if lines == wanted:
                    raise KeyboardInterrupt
            return trace

        previous = sys.gettrace()
        sys.settrace(trace)
        try:
            hello(own)
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(previous)
        return False

    line = 0
    while interrupt_at(line := line + stride):
        assert not is_renderer_locked(own)
        assert hello(own) == "hello"
    assert line > 20


SCRIPT = """
import os, sys
from mie.text.chat import ChatTemplate
template = ChatTemplate("{{ messages[0].content }}")
print(template.render([{"role": "user", "content": "hello"}]))
print(template._renderer._worker.pid, flush=True)
"""


def run_script(script: str, **options: Any) -> list[str]:
    process = python("-W", "error", "-c", script, **options)
    assert process.stderr == ""
    return process.stdout.splitlines()


@pytest.mark.parametrize("stdin", ["closed", "open"])
def test_rendering_works_without_stdin_and_leaves_no_process(stdin: str) -> None:
    close = (lambda: os.close(0)) if stdin == "closed" else None
    text, pid = run_script(SCRIPT, preexec_fn=close)
    assert text == "hello"
    assert_ends(int(pid))


def test_the_worker_ignores_the_users_main_and_python_settings(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('wrong json')")
    (tmp_path / "main.py").write_text("print('main')\n" + SCRIPT)
    environment = {**os.environ, "PYTHONWARNINGS": "error"}
    program = f"import runpy; runpy.run_path({str(tmp_path / 'main.py')!r})"
    process = python("-c", program, env=environment)
    assert process.stdout.splitlines()[:2] == ["main", "hello"]


def test_the_worker_ends_when_its_parent_is_killed() -> None:
    text, pid = run_script(SCRIPT + "os.kill(os.getpid(), 9)", code=-9)
    assert text == "hello"
    assert_ends(int(pid))


def test_the_worker_is_killed_although_its_parent_ignores_the_signal() -> None:
    ignore = "import signal; signal.signal(signal.SIGPROF, signal.SIG_IGN)\n"
    block = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPROF])\n"
    endless = f"""
try:
    ChatTemplate({RUNAWAYS["nested loops"]!r}).render([{{"role": "user", "content": "hello"}}])
except Exception as error:
    print(error)
"""
    assert "did not end" in run_script(ignore + block + SCRIPT + endless)[-1]
