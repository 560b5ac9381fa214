"""Try a learner's file: compare its tokens with the oracle's, and check its rules."""

import ast
import json
import linecache
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CellType, FunctionType, ModuleType
from typing import Any

from mie.learn.checks import CHECKS
from mie.learn.exercises import Exercise, exercises, open_holes, program
from mie.learn.probe import Broken

FOX = "Once there was a fox named Ruby"
OWL = "One day a small owl"
CLOUDS = "High above the clouds the"
STORY = f"{FOX} who lived in the library. Ruby had a long red tail.{FOX}"

MAX_PASSES = 150
"""Maximum number of passes of a scenario. A right answer needs fewer than 80."""
CAST = {
    5: " (A to E are requests of the check.)",
    6: " (A, B and C are requests of the check, and D is a fork of A.)",
    9: " (A to F are jobs of the check.)",
}
"""A note about the names in the observations of an exercise."""
MAX_FRAMES = 4
"""Maximum number of lines of a learner that a failure shows."""


class Late(BaseException):
    """The time of a trial is over. A learner's ``except Exception`` does not catch it."""


class NoEnd(Exception):
    """The model was called more often than any right answer needs."""


@dataclass
class Verdict:
    """The result of a trial."""

    is_solved: bool = False
    rule: str | None = None
    """The name of the first rule that is broken."""
    lines: list[str] = field(default_factory=list)
    """The report, one paragraph a line."""
    right: list[str] = field(default_factory=list)
    """The functions that keep all rules, while others are open."""


class Steps:
    """The solutions of all exercises as modules, and the bundled model."""

    def __init__(self) -> None:
        self.modules: dict[int, ModuleType] = {}
        with _importable(self.modules):
            for each in exercises():
                self.modules[each.number] = _run(
                    each, each.solution(), f"<solution of {each.name}>"
                )
                sys.modules[f"step_{each.number}"] = self.modules[each.number]
        self.model = self.modules[1].load()
        for weight in self.model.weights.values():
            weight.flags.writeable = False  # a learner's quantise must not change the oracle

    def load(self, exercise: Exercise, source: str, path: str) -> ModuleType:
        """Run a learner's file. The steps that it imports are the solutions."""
        with _importable(self.modules):
            return _run(exercise, source, path)

    def oracle(self, prompt: list[int], count: int) -> list[int]:
        """Return the right text, a prompt and ``count`` more tokens."""
        return [*self.modules[2].generate(self.model, prompt, count)]


@contextmanager
def _importable(modules: Mapping[int, ModuleType]) -> Iterator[None]:
    """Make ``import step_1`` find the solutions while the block runs."""
    names = [f"step_{each.number}" for each in exercises()]
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.modules.update({f"step_{number}": module for number, module in modules.items()})
    try:
        yield
    finally:
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(before)


def _run(exercise: Exercise, source: str, path: str) -> ModuleType:
    module = ModuleType(f"step_{exercise.number}")
    module.__file__ = path
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    exec(compile(source, path, "exec"), module.__dict__)
    return module


# The tokens.


class WatchedModel:
    """A model that notes the state of the sequences before each pass."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.config, self.weights = model.config, model.weights
        self.seqs: list[Any] = []
        self.states: list[dict[str, tuple[int, list[int], int]]] = []
        """For each pass, by name: the number of tokens, the table, and num_computed."""

    def forward(self, tokens: Any, positions: Any, attend: Any) -> Any:
        """Note the state, and compute the pass.

        Raises:
            NoEnd: there were too many passes.
        """
        if len(self.states) == MAX_PASSES:
            raise NoEnd(f"the model was called {MAX_PASSES} times, and the texts are not done")
        self.states.append(
            {seq.name: (len(seq.tokens), list(seq.table), seq.num_computed) for seq in self.seqs}
        )
        return self._model.forward(tokens, positions, attend)


@dataclass
class Request:
    """A request of a scenario, and its right text."""

    name: str
    prompt: list[int]
    right: list[int]
    tokens: list[int] | None = None


class Scenario:
    """The requests of an exercise with the bundled model."""

    def __init__(self, steps: Steps, module: Any, number: int) -> None:
        self._steps, self._module, self._number = steps, module, number
        self._solutions = steps.modules
        is_own = number == 1  # the first file has the model itself
        model = steps.model
        self.model = WatchedModel(module.Model(model.config, model.weights) if is_own else model)
        self.requests: list[Request] = []
        self._pool: Any = None

    def run(self) -> None:
        """Compute all requests with the learner's code."""
        getattr(self, f"_run_{self._number}")()

    def _prompt(self, text: str) -> list[int]:
        return [*self._solutions[1].encode(text)]

    def _request(self, name: str, text: str, count: int) -> Request:
        prompt = self._prompt(text)
        request = Request(name, prompt, self._steps.oracle(prompt, count))
        self.requests.append(request)
        return request

    def _sequence(self, name: str, text: str, count: int) -> Any:
        request = self._request(name, text, count)
        seq = self._solutions[3].Sequence(name, request.prompt, count)
        if self._number == 3:
            seq = self._module.Sequence(name, request.prompt, count)
        request.tokens = seq.tokens
        self.model.seqs.append(seq)
        return seq

    def _run_1(self) -> None:
        request = self._request("A", FOX, 10)
        request.tokens = self._module.generate(self.model, list(request.prompt), 10)

    _run_2 = _run_1

    def _new_pool(self, pool_class: Any, num_blocks: int) -> Any:
        self._pool = pool_class(self.model, num_blocks=num_blocks, block_size=4)
        self._pool.free = [block for block in (5, 2, 6, 0, 7, 3, 1, 4) if block < num_blocks]
        return self._pool

    def _run_3(self) -> None:
        pool = self._new_pool(self._module.Pool, 8)
        self._module.generate(self.model, pool, self._sequence("A", FOX, 9))

    def _run_4(self) -> None:
        pool = self._new_pool(self._solutions[3].Pool, 8)
        fox, owl = self._sequence("A", FOX, 6), self._sequence("B", OWL, 6)
        for number in range(12):
            running = [
                seq for seq in (fox, owl)[: 1 + (number > 1)] if len(seq.tokens) < seq.max_tokens
            ]
            batch = [(seq, min(4, len(seq.tokens) - seq.num_computed)) for seq in running]
            if batch and all(
                count > 0 and pool.grow(s, s.num_computed + count) for s, count in batch
            ):
                self._module.run(self.model, pool, batch)

    def _drive(self, engine: Any, *seqs: Any) -> None:
        for seq in seqs:
            engine.add(seq)
        for _ in range(80):
            if not engine.waiting and not engine.running:
                break
            engine.step()

    def _run_5(self) -> None:
        pool = self._new_pool(self._solutions[3].Pool, 8)
        seqs = [self._sequence(*each, 9) for each in zip("ABC", (FOX, OWL, CLOUDS), strict=True)]
        self._drive(self._module.Engine(self.model, pool, 12), *seqs)

    def _run_6(self) -> None:
        pool = self._new_pool(self._module.SharingPool, 8)
        engine = self._module.SharingEngine(self.model, pool)
        ruby, hugo = (
            self._sequence("A", FOX, 8),
            self._sequence("B", FOX.replace("Ruby", "Hugo"), 8),
        )
        engine.add(ruby)
        engine.step()
        engine.add(hugo)
        engine.step()
        if len(ruby.tokens) < ruby.max_tokens:
            was = self._prompt(" was")[1]
            prompt = [*ruby.tokens[:-1], was]
            child = engine.fork(ruby, "C", was)
            right = self._steps.oracle(prompt, ruby.max_tokens - len(prompt))
            self.requests.append(Request("C", prompt, right, child.tokens))
            self.model.seqs.append(child)
        self._drive(engine)

    def _run_7(self) -> None:
        prompt = self._prompt(FOX)
        for name, bits in (("A", 8), ("B", 4)):
            right = self._solutions[7].QuantisedModel(self._steps.model, bits)
            model = self._module.QuantisedModel(self._steps.model, bits)
            generate = self._solutions[2].generate
            request = Request(f"{name} ({bits} bits)", prompt, generate(right, prompt, 8))
            self.requests.append(request)
            request.tokens = generate(model, prompt, 8)

    def _run_8(self) -> None:
        pool = self._pool = self._solutions[3].Pool(self.model, num_blocks=20, block_size=4)
        self._module.generate(self.model, pool, self._sequence("A", STORY, 14))

    def _run_9(self) -> None:
        pool = self._new_pool(self._solutions[3].Pool, 6)
        engine = self._module.ShortestFirst(self.model, pool)
        seqs = [self._sequence(*each) for each in (("A", FOX, 9), ("B", OWL, 8), ("C", CLOUDS, 3))]
        self._drive(engine, *seqs)

    def difference(self) -> list[str]:
        """Return sentences about the first token that differs, or an empty list."""
        found = []
        for request in self.requests:
            tokens, right = request.tokens, request.right
            if tokens is None:
                found.append(
                    (len(self.model.states), 0, [f"Request {request.name} has no tokens."])
                )
                continue
            tokens = [int(token) for token in tokens]
            at = next(
                (i for i, (a, b) in enumerate(zip(tokens, right, strict=False)) if a != b),
                min(len(tokens), len(right)),
            )
            if at < max(len(tokens), len(right)):
                number, state = self._state(request.name, at)
                found.append((number, at, self._sentences(request, tokens, at, state)))
        return min(found)[2] if found else []

    def _state(self, name: str, at: int) -> tuple[int, tuple[int, list[int], int] | None]:
        """Return the pass that chose a token, and the sequence's state before the pass."""
        for number in reversed(range(len(self.model.states))):
            state = self.model.states[number].get(name)
            if state and state[0] == at:
                return number, state
        return len(self.model.states), None

    def _sentences(self, request: Request, tokens: list[int], at: int, state: Any) -> list[str]:
        decode = self._solutions[1].decode

        def word(ids: list[int]) -> str:
            text = decode(ids[at : at + 1])
            return repr(text) if text else f"the special token {ids[at]}"

        if at == len(tokens):
            seen = f"your text ends, and the oracle's token is {word(request.right)}."
        elif at == len(request.right):
            seen = f"the oracle's text ends, and your token is {word(tokens)}."
        else:
            seen = f"the token is {word(tokens)}, and the oracle's is {word(request.right)}."
        before = decode(request.right[:at])
        where = f"Request {request.name}, position" if self._number > 2 else "Position"
        lines = [f"{where} {at}: {seen} Before it: {before!r}"]
        if state:
            lines.append(
                f"Block table of {request.name} then: {state[1]}, with blocks of "
                f"{self._pool.block_size} tokens; {state[2]} of {state[0]} tokens were computed "
                "before the step."
            )
        return lines

    @property
    def praise(self) -> str:
        """A sentence about equal tokens."""
        num = sum(len(each.right) - len(each.prompt) for each in self.requests)
        texts = "text" if len(self.requests) == 1 else "texts"
        return f"All {num} new tokens of {len(self.requests)} {texts} equal the oracle's."


# The verdict.


def failure(error: BaseException, path: str) -> list[str]:
    """Return the lines of a learner's file that an error passed, and the error."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
    lines = []
    for frame in frames[-MAX_FRAMES:]:
        lines += [f"  line {frame.lineno}, in {frame.name}", f"    {(frame.line or '').strip()}"]
    message = str(error).strip()
    if type(error).__name__ == "BdbQuit":
        message = "a check has no debugger; remove breakpoint(), or run the file itself"
    if not lines:
        lines = ["  in the check, which reads the results of your functions"]
    return [*lines, f"  {type(error).__name__}{': ' * bool(message)}{message[:300]}"]


def try_out(steps: Steps, exercise: Exercise, source: str, path: str) -> Verdict:
    """Return the verdict about a learner's file.

    Raises:
        Late: the time is over.
    """
    name = exercise.name
    try:
        ast.parse(source)
        holes = open_holes(exercise, source)
        module = steps.load(exercise, source, path)
    except SyntaxError as error:
        shown = (error.text or "").strip()
        return Verdict(lines=[f"{name} is not Python: line {error.lineno}: {error.msg}: {shown}"])
    except Exception as error:
        return Verdict(lines=[f"{name} cannot be loaded.", *failure(error, path)])
    given = ast.parse(exercise.solution()).body
    names = [x.name for x in given if isinstance(x, ast.ClassDef | ast.FunctionDef)]
    missing = [each for each in [*exercise.holes, *names] if not _has(module, each)]
    if missing:
        seen = " and no ".join(dict.fromkeys(missing[:3]))
        return Verdict(lines=[f"{name} has no {seen}; keep the given names."])
    if holes:
        return _partial(steps, exercise, module, [*holes], path)
    broken, trouble = _broken(steps, exercise, module)
    scenario = Scenario(steps, module, exercise.number)
    crash = None
    try:
        scenario.run()
    except Exception as error:
        crash = error
    difference = [] if crash else scenario.difference()
    if not (broken or trouble or crash or difference):
        return Verdict(True, None, [f"{name} is right. {scenario.praise}"])
    lines = []
    if difference:
        lines = [f"{name}: a token differs from the oracle's.", *difference]
    elif not crash and not trouble:
        lines = [f"{name}: the tokens of this run equal the oracle's, but a rule is broken."]
    else:
        lines = [f"{name} fails.", *failure(crash or trouble or AssertionError(), path)]
    if broken:
        lines += _sentences(exercise, broken)
    elif trouble and difference:
        lines += ["In a small situation of the check, your code fails:", *failure(trouble, path)]
    elif not trouble and not crash:
        seen = (
            "The check does not know this mistake: every rule that it knows is kept. Compare your"
        )
        lines.append(f"{seen} code with the solution: {program()} learn solution {exercise.number}")
    lines.append(f"Page: {exercise.page}")
    return Verdict(False, broken.rule if broken else None, lines)


def _has(module: ModuleType, hole: str) -> bool:
    found: Any = module
    for part in hole.split("."):
        found = getattr(found, part, None)
    return callable(found)


def _broken(
    steps: Steps, exercise: Exercise, module: ModuleType
) -> tuple[Broken | None, Exception | None]:
    """Return the first broken rule, or the error that a check got from the learner's code."""
    try:
        CHECKS[exercise.number](module, steps.modules)
    except Broken as broken:
        return broken, None
    except Exception as error:
        return None, error
    return None, None


def _sentences(exercise: Exercise, broken: Broken) -> list[str]:
    rules = json.loads(Path(__file__).with_name("rules.json").read_text(encoding="utf-8"))
    must = {**rules["all"], **rules.get(str(exercise.number), {})}[broken.rule]
    seen = broken.seen
    if re.search(r"\b[A-F]\b", seen):
        seen += CAST.get(exercise.number, "")
    if exercise.number < 3:  # these have one text, and no requests
        seen = re.sub(r" of request \w", "", re.sub(r"request \w got", "the text got", seen))
    return [f"Seen: {seen}", f"Rule ({broken.rule}): {must}"]


def _partial(
    steps: Steps, exercise: Exercise, module: ModuleType, holes: list[tuple[str, int]], path: str
) -> Verdict:
    """Check the functions that are written. The solution's functions fill the holes."""
    names = [f"{hole} (line {line})" for hole, line in holes]
    right = [hole for hole in exercise.holes if hole not in dict(holes)]
    lines = [f"{exercise.name} has {len(holes)} of {len(exercise.holes)} functions to write: "]
    lines[0] += f"{', '.join(names)}."
    page = f"Page: {exercise.page}"
    if not right:
        return Verdict(lines=[*lines, page])
    for hole, _ in holes:
        _fill(module, steps.modules[exercise.number], hole)
    broken, trouble = _broken(steps, exercise, module)
    if broken:
        lines = [f"{exercise.name} breaks a rule.", *_sentences(exercise, broken), *lines]
        return Verdict(False, broken.rule, [*lines, page])
    if trouble:
        return Verdict(lines=[f"{exercise.name} fails.", *failure(trouble, path), *lines, page])
    is_one, was = len(right) == 1, "was" if len(holes) == 1 else "were"
    given = f"{', '.join(hole for hole, _ in holes)} {was} taken from the solution"
    seen = f"{', '.join(right)} {'is' if is_one else 'are'} right ({given})."
    return Verdict(lines=[f"{seen} Next: write {names[0]}."], right=right)


def _fill(module: ModuleType, solution: ModuleType, hole: str) -> None:
    """Give a learner's module a function of the solution. It uses the names of the module."""
    owner, _, name = hole.rpartition(".")
    place, source = (vars(each)[owner] if owner else each for each in (module, solution))
    function = getattr(source, name)
    cells = tuple(CellType(place) for _ in function.__closure__ or ())  # the class, for super()
    names = module.__dict__
    setattr(place, name, FunctionType(function.__code__, names, name, function.__defaults__, cells))
