"""Explore every interleaving of the threads that run a program of the `jit` backend.

The model is the source of `mie.ops_jit.kernels.team` itself: each function becomes a generator that
yields wherever it touches memory. So the model cannot differ from the code, and a mistake in the
code is one in the model.

A thread's state is where it stands and its variables. The state of all is theirs and the memory's.
The explorer visits each state once, so it ends although threads wait in loops.
"""

import ast
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mie
from mie.ops_jit import layout

SOURCE = Path(mie.__file__).parent / "ops_jit/kernels/team.py"
MEMORY = ("word", "set_word", "acquire", "release", "swap_if", "exchange", "fetch_add", "call_c")
HEADERS, PROGRAMS, SCRATCH = 10_000, 100_000, 1_000_000
SEM_WAIT, SEM_POST, SCHED_YIELD = 1, 2, 3
MOST_STATES = 1_000_000
SEMAPHORE = 8
"""Words from a worker's flag to its semaphore."""

Operation = tuple[Any, ...]
Thread = Generator[Operation, int, None]


class Violation(AssertionError):
    """The protocol breaks a promise."""


class _Yields(ast.NodeTransformer):
    """Makes generators of the kernels' functions."""

    def __init__(self, functions: set[str]) -> None:
        self._functions = functions
        self._number = 0
        self._results: list[str] = []

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        assert isinstance(node.func, ast.Name)
        if node.func.id in MEMORY:
            operation = ast.Tuple([ast.Constant(node.func.id), *node.args], ast.Load())
            result: ast.expr = ast.Yield(operation)
        elif node.func.id in self._functions:
            result = ast.YieldFrom(node)
        else:
            return node
        # A result that is not used yet is a part of the thread's state, so it gets a name.
        self._number += 1
        self._results.append(name := f"result_{self._number}")
        return ast.NamedExpr(ast.Name(name, ast.Store()), result)

    def _forgetting(self, names: Sequence[str]) -> list[ast.stmt]:
        targets: list[ast.expr] = [ast.Name(name, ast.Store()) for name in names]
        return [ast.Assign(targets, ast.Constant(None))] if names else []

    def _block(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """Return the statements of a block. Dead variables are forgotten: they are no state."""
        found: list[ast.stmt] = []
        for statement in body:
            self._results = []
            if isinstance(statement, ast.While | ast.If):
                dead = _dead_in(statement) if isinstance(statement, ast.While) else []
                statement.test = self.visit(statement.test)
                forget = self._forgetting(self._results)
                again = self._forgetting(dead)
                statement.body = [*forget, *again, *self._block(statement.body)]
                statement.orelse = [*forget, *self._block(statement.orelse)]
                found.append(statement)
            elif isinstance(statement, ast.For):
                statement.body = self._block(statement.body)
                found.append(statement)
            else:
                found += [self.visit(statement), *self._forgetting(self._results)]
        return found

    def function(self, node: ast.FunctionDef) -> ast.FunctionDef:
        """Return a function as a generator."""
        node.decorator_list = []
        node.body = self._block(node.body)
        node.body.append(ast.parse("if False: yield").body[0])
        return node


def _dead_in(loop: ast.While) -> list[str]:
    """Return the variables that each turn of an endless loop sets before it reads them."""
    if not (isinstance(loop.test, ast.Constant) and loop.test.value is True):
        return []  # its variables may be read after it
    names = [node for node in ast.walk(loop) if isinstance(node, ast.Name)]
    # In an assignment, the value is read before the target is set.
    names.sort(key=lambda node: (node.lineno, isinstance(node.ctx, ast.Store), node.col_offset))
    first: dict[str, ast.Name] = {}
    for node in names:
        first.setdefault(node.id, node)
    own = {name for name, node in first.items() if isinstance(node.ctx, ast.Store)}
    return sorted(own - {"turns"})


def functions_of(source: str, num_runs: int) -> dict[str, Callable[..., Thread]]:
    """Return the kernels of the module as generators."""
    tree = ast.parse(source)
    kernels = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and [ast.unparse(each) for each in node.decorator_list] == ["kernel_function"]
    ]
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    constants = [node for node in assigned if isinstance(node.targets[0], ast.Name)]
    names = {node.name for node in kernels}
    body = [*constants, *(_Yields(names | {"call_kernel"}).function(each) for each in kernels)]
    module = ast.fix_missing_locations(ast.Module(body, []))  # type: ignore[arg-type]
    space: dict[str, Any] = {**vars(layout), "pause": lambda: None, "call_kernel": _call_kernel}
    exec(compile(module, "model", "exec"), space)
    space["SPINS"] = space["TURNS_BEFORE_YIELD"] = 1
    space["LAST_RUN"] = min(space["LAST_RUN"], num_runs - 1)
    return {name: space[name] for name in names}


def _call_kernel(kernel: int, args: int, header: int, tile: int, scratch: int) -> Thread:
    yield "begin", kernel, header, tile, scratch
    yield "end", kernel, tile


@dataclass
class Case:
    """The caller's statements."""

    runs: Sequence[Sequence[int]]
    """The numbers of tiles of each run's instructions."""
    workers: int = 1
    woken: int | None = None
    """How many workers a run uses, if not all."""
    first_run: int = 0
    """The number of the run before the first."""
    num_runs: int = 1 << 23
    """The numbers of runs that there are. A thread may sleep while all of them pass."""
    share_shift: int = 3
    """A thread takes the number of tiles that are left, shifted right by so many bits."""
    delayed: bool = False
    """Whether plain stores reach memory later and in any order, as on ARM."""


@dataclass
class _Place:
    """Where a thread stands: its next statement, and its calls."""

    operation: Operation | None
    history: tuple[int, ...]
    holds: bool
    """Whether it has taken a tile that is not counted."""
    functions: tuple[str, ...]
    after: dict[int, int] = field(default_factory=dict)
    """The next place, by the operation's result."""


class _Automaton:
    """The places of one thread, found as they are needed."""

    def __init__(self, new: Callable[[], Thread], constants: dict[int, int]) -> None:
        self._new, self._constants = new, constants
        self.places: list[_Place] = []
        self._numbers: dict[Any, int] = {}
        self._enter((), holds=False)

    def next(self, place: int, result: int) -> int:
        """Return the place after an operation with this result."""
        here = self.places[place]
        if result not in here.after:
            assert here.operation is not None
            holds = here.holds or (here.operation[0] == "swap_if" and result == 1)
            here.after[result] = self._enter((*here.history, result), holds=holds)
        return here.after[result]

    def _enter(self, history: tuple[int, ...], *, holds: bool) -> int:
        thread = self._new()
        results = iter(history)
        operation = self._visible(thread, next(thread))
        for result in results:
            operation = self._visible(thread, None, result)
        if operation is not None and operation[:2] == ("acquire", layout.TICKET * 8):
            holds = False
        frames = tuple(_frames(thread)) if operation is not None else ()
        key = frames, operation, holds
        if key not in self._numbers:
            self._numbers[key] = len(self.places)
            functions = tuple(frame[0] for frame in frames)
            self.places.append(_Place(operation, history, holds, functions))
        return self._numbers[key]

    def _visible(
        self, thread: Thread, operation: Operation | None, result: int = 0
    ) -> Operation | None:
        """Go on until the thread touches memory that changes."""
        try:
            if operation is None:
                operation = thread.send(result)
            while True:
                name, *values = operation
                if name == "word" and values[0] + values[1] * 8 in self._constants:
                    result = self._constants[values[0] + values[1] * 8]
                elif name == "call_c" and values[0] == SCHED_YIELD:
                    result = 0
                elif name == "word":
                    return "acquire", values[0] + values[1] * 8
                elif name == "set_word":
                    return "store", values[0] + values[1] * 8, values[2]
                else:
                    return operation
                operation = thread.send(result)
        except StopIteration:
            return None


def _frames(thread: Any) -> Any:
    """Yield the state of each function on a thread's stack."""
    while thread is not None:
        frame = thread.gi_frame
        name = frame.f_code.co_name
        found = {key: value for key, value in frame.f_locals.items() if isinstance(value, int)}
        if name == "take_part":
            found.pop("turns", None)  # only decides when to yield the CPU
        yield name, frame.f_lasti, tuple(sorted(found.items()))
        thread = thread.gi_yieldfrom


State = tuple[tuple[int, ...], tuple[tuple[tuple[int, int], ...], ...], tuple[int, ...]]
"""The memory, each thread's delayed stores, and each thread's place."""


class Explorer:
    """The states of a case, and the checks of them."""

    def __init__(self, case: Case, source: str | None = None) -> None:
        self._case = case
        source = SOURCE.read_text() if source is None else source
        functions = functions_of(source, case.num_runs)
        self._constants = {
            layout.WAIT * 8: SEM_WAIT,
            layout.POST * 8: SEM_POST,
            layout.YIELD * 8: SCHED_YIELD,
            layout.SHARE_SHIFT * 8: case.share_shift,
        }
        for run, counts in enumerate(case.runs):
            for instruction, count in enumerate(counts):
                self._constants[_header(run) + instruction * 8] = count
                row = _program(run) + instruction * layout.INSTRUCTION_WORDS * 8
                for word, value in (
                    (layout.KERNEL, run * 100 + instruction),
                    (layout.TILE_COUNT, instruction),
                    (layout.TILE_SIZE, 1),
                    (layout.TILE_FACTOR, 1),
                ):
                    self._constants[row + word * 8] = value
        words = [layout.TICKET, layout.DONE, layout.STOP, layout.TILES]
        words += [layout.PROGRAM, layout.HEADER, layout.END]
        for worker in range(case.workers):
            words += [_flag(worker), _flag(worker) + SEMAPHORE]
        self._index = {word * 8: index for index, word in enumerate(words)}
        # After the words: the run that goes on, and bits of its tiles that have begun and ended.
        self._begun = len(words) + 1
        memory = [0] * (len(words) + 3)
        memory[0] = case.first_run << layout.RUN_SHIFT
        threads = [lambda: self._caller(functions["run"])]
        for worker in range(case.workers):
            threads.append(lambda worker=worker: functions["work"](0, worker, SCRATCH + worker + 1))
        self._threads = [_Automaton(each, self._constants) for each in threads]
        empty: State = (tuple(memory), ((),) * len(threads), (0,) * len(threads))
        self.states: list[State] = [empty]
        self._numbers = {empty: 0}
        self._came: list[tuple[int, str]] = [(-1, "")]
        self._edges: list[list[tuple[int, int]]] = []

    def _caller(self, run: Callable[..., Thread]) -> Thread:
        """Act as `Team.run` and the end of a team do."""
        woken = self._case.workers if self._case.woken is None else self._case.woken
        for number, counts in enumerate(self._case.runs):
            yield "start", number
            yield from run(0, _program(number), _header(number), 0, len(counts), woken, SCRATCH)
            yield "return", number
        yield "release", layout.STOP * 8, 1
        for worker in range(self._case.workers):
            yield "call_c", SEM_POST, (_flag(worker) + SEMAPHORE) * 8

    def check(self) -> int:
        """Visit all states and return their number.

        Raises:
            Violation: a tile is done twice, never or too early, or a thread waits forever.
        """
        at = 0
        while at < len(self.states):
            assert at < MOST_STATES, "the case is too large"
            self._edges.append([])
            for thread in range(len(self._threads)):
                for state, what in self._moves(at, thread):
                    if state not in self._numbers:
                        self._numbers[state] = len(self.states)
                        self.states.append(state)
                        self._came.append((at, f"{thread}: {what}"))
                    self._edges[at].append((thread, self._numbers[state]))
            at += 1
        self._check_that_all_end()
        self._check_that_a_stalled_worker_holds_up_nobody()
        self._check_that_workers_wake()
        return len(self.states)

    def _moves(self, at: int, thread: int) -> list[tuple[State, str]]:
        """Return the states after each step that a thread can take."""
        memory, delayed, places = self.states[at]
        found = []
        own = delayed[thread]
        for i, (index, value) in enumerate(own):
            if all(each != index for each, _ in own[:i]):  # the oldest store of its word
                left = (*delayed[:thread], own[:i] + own[i + 1 :], *delayed[thread + 1 :])
                moved = _with(memory, index, value)
                found.append(((moved, left, places), "a store arrives"))
        operation = self._threads[thread].places[places[thread]].operation
        if operation is None:
            return found
        if own and operation[0] in ("release", "swap_if", "exchange", "fetch_add", "call_c"):
            return found
        for moved, mine, result in self._results(at, memory, own, operation, thread):
            place = self._threads[thread].next(places[thread], result)
            stores = (*delayed[:thread], mine, *delayed[thread + 1 :])
            others = (*places[:thread], place, *places[thread + 1 :])
            found.append(((moved, stores, others), f"{operation} = {result}"))
        return found

    def _results(
        self, at: int, memory: tuple[int, ...], own: Any, operation: Operation, thread: int
    ) -> list[tuple[tuple[int, ...], Any, int]]:
        name, *values = operation
        if name == "call_c":
            index = self._index[values[1]]
            if values[0] == SEM_POST:
                return [(_with(memory, index, memory[index] + 1), own, 0)]
            interrupted = (memory, own, -1)
            if not memory[index]:
                return [interrupted]
            return [interrupted, (_with(memory, index, memory[index] - 1), own, 0)]
        if name in ("start", "return", "begin", "end"):
            return [(self._tile(at, memory, operation, thread), own, 0)]
        index = self._index[values[0]]
        old = memory[index]
        if name == "acquire":
            mine = [value for each, value in own if each == index]
            return [(memory, own, mine[-1] if mine else old)]
        if name == "store" and self._case.delayed:
            return [(memory, (*own, (index, values[1])), 0)]
        if name in ("store", "release"):
            return [(_with(memory, index, values[1]), own, 0)]
        if name == "exchange":
            return [(_with(memory, index, values[1]), own, old)]
        if name == "fetch_add":
            return [(_with(memory, index, old + values[1]), own, old)]
        assert name == "swap_if"
        if old != values[1]:
            return [(memory, own, 0)]
        return [(_with(memory, index, values[2]), own, 1)]

    def _tile(
        self, at: int, memory: tuple[int, ...], operation: Operation, thread: int
    ) -> tuple[int, ...]:
        """Check that a tile may begin or a run end, and note it."""
        begun, run = self._begun, memory[self._begun - 1]
        if operation[0] == "start":
            return (*memory[: begun - 1], operation[1], 0, 0)
        counts = self._case.runs[run]
        if operation[0] == "return":
            if memory[begun + 1] != (1 << sum(counts)) - 1:
                self._fail(at, "a run returned before all its tiles were done")
            return memory
        kernel, tile = operation[1], operation[-1 if operation[0] == "end" else 3]
        instruction = kernel % 100
        before = sum(counts[:instruction])
        bit = 1 << max(0, before + tile)  # a mistake may give a tile below 0
        if operation[0] == "end":
            return _with(memory, begun + 1, memory[begun + 1] | bit)
        if kernel // 100 != run or operation[2] != _header(run):
            self._fail(at, f"thread {thread} begins a tile of a run that is over")
        if not 0 <= tile < counts[instruction]:
            self._fail(at, f"instruction {instruction} has no tile {tile}")
        if memory[begun] & bit:
            self._fail(at, f"tile {tile} of instruction {instruction} is done twice")
        if memory[begun + 1] & ((1 << before) - 1) != (1 << before) - 1:
            self._fail(at, f"instruction {instruction} begins before the one before it has ended")
        if operation[4] != SCRATCH + thread:
            self._fail(at, f"thread {thread} uses the scratch memory of another")
        return _with(memory, begun, memory[begun] | bit)

    def _check_that_all_end(self) -> None:
        ends = [not edges or self._is_over(at) for at, edges in enumerate(self._edges)]
        for at, edges in enumerate(self._edges):
            if not edges and not self._is_over(at):
                self._fail(at, "no thread can go on")
        self._check_reachable(lambda at: self._is_over(at), lambda at: True, lambda thread: True)
        assert any(ends)

    def _is_over(self, at: int) -> bool:
        places = self.states[at][2]
        return all(
            automaton.places[place].operation is None
            for automaton, place in zip(self._threads, places, strict=True)
        )

    def _check_that_a_stalled_worker_holds_up_nobody(self) -> None:
        """Check that the caller returns from all runs if a worker without a tile never moves."""
        caller = self._threads[0]

        def has_returned(at: int) -> bool:
            return caller.places[self.states[at][2][0]].operation is None

        for worker in range(1, len(self._threads)):
            self._check_reachable(
                has_returned,
                lambda at, worker=worker: (
                    not self._threads[worker].places[self.states[at][2][worker]].holds
                    and not self.states[at][1][worker]
                ),
                lambda thread, worker=worker: thread != worker,
            )

    def _check_that_workers_wake(self) -> None:
        """Check that the workers finish a run whose caller stalls once it has woken them.

        A worker that slept while all numbers of runs passed may not see that there is a new run.
        """
        if self._case.woken == 0 or self._case.first_run or self._case.num_runs < 3:
            return

        def is_done(at: int) -> bool:
            memory = self.states[at][0]
            return (
                memory[self._begun + 1] == (1 << sum(self._case.runs[memory[self._begun - 1]])) - 1
            )

        def has_woken(at: int) -> bool:
            place = self._threads[0].places[self.states[at][2][0]]
            return "take_part" in place.functions and not place.holds and not self.states[at][1][0]

        self._check_reachable(is_done, has_woken, lambda thread: thread != 0)

    def _check_reachable(
        self,
        is_good: Callable[[int], bool],
        applies: Callable[[int], bool],
        may_move: Callable[[int], bool],
    ) -> None:
        """Check that a good state can be reached from every state where this applies."""
        before: list[list[int]] = [[] for _ in self.states]
        for at, edges in enumerate(self._edges):
            for thread, target in edges:
                if may_move(thread):
                    before[target].append(at)
        reached = [is_good(at) for at in range(len(self.states))]
        todo = deque(at for at, good in enumerate(reached) if good)
        while todo:
            for at in before[todo.popleft()]:
                if not reached[at]:
                    reached[at] = True
                    todo.append(at)
        for at, good in enumerate(reached):
            if not good and applies(at):
                self._fail(at, "threads wait forever")

    def _fail(self, at: int, what: str) -> None:
        steps = []
        while at > 0:
            at, step = self._came[at]
            steps.append(step)
        raise Violation("\n".join([what, *steps[::-1]]))


def _with(memory: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    value = (value + (1 << 63)) % (1 << 64) - (1 << 63)
    return (*memory[:index], value, *memory[index + 1 :])


def _flag(worker: int) -> int:
    return layout.SLEEPERS + worker * layout.WORKER_WORDS


def _program(run: int) -> int:
    return PROGRAMS + run * 10_000


def _header(run: int) -> int:
    return HEADERS + run * 1_000
