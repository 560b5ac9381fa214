"""Check that drafts never change a bit of an answer, whatever the drafts are.

Each scenario runs without drafts. Then it runs with drafts that are right, wrong, or both, and must
give the same tokens, log-probabilities and reasons. `test_engine_equals_naive` checks the run
without drafts against the oracle.
"""

from itertools import chain

import pytest
from compiled import needs_numba
from drafters import KINDS, Oracle
from emulated import needs_compiler
from hypothesis import given, settings
from hypothesis import strategies as st
from rare import check_until_seen
from test_engine_equals_naive import VOCAB, Run, new_engine, scenarios, seen
from test_hybrids_equal_naive import hybrid_scenarios, in_bytes, state_bytes
from tiny_hybrids import HYBRIDS, TinyHybrid

from mie.engine.watch.snapshot import scheduler_snapshot
from mie.events.replay import State

OFTEN = (
    *("drafts kept", "drafts dropped", "drafts all kept", "preempted by recompute", "prefix hits"),
    *("fork", "aborts", "forced", "copies, fork", "constrained drafts", "trims", "pass", "wait"),
    *("logprobs of drafts", "interrupts"),
)
OF_HYBRIDS = ("drafts kept", "drafts dropped", "drafts all kept", "reverts", "forced", "interrupts")
WITH_ANY_BACKEND = ("drafts kept", "drafts dropped", "drafts all kept")


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hybrids")
    return {name: TinyHybrid(folder / name, config) for name, config in HYBRIDS.items()}


class InterruptedRunner:
    """A runner with three steps that are interrupted before their results are used."""

    def __init__(self, runner, every):
        self._runner, self._every, self._num_steps = runner, every, 0

    @property
    def is_ahead(self):
        return self._runner.is_ahead

    def run(self, plan):
        result = self._runner.run(plan)
        self._num_steps += 1
        if self._num_steps in (self._every, 2 * self._every, 3 * self._every):
            raise InterruptedError
        return result


class DraftedRun(Run):
    """A run with drafts, some of whose steps are interrupted."""

    def __init__(self, engine, scenario):
        step, self.num_steps = engine.step, 0
        self.state = State.from_snapshot(scheduler_snapshot(engine.scheduler))
        engine.step = lambda: self._step(step)
        super().__init__(engine, scenario)
        # An interrupted step reports nothing.
        self.failed |= {index for index, request in self.requests.items() if request.error}

    def _step(self, step):
        while True:
            try:
                return step()
            except InterruptedError:
                seen["interrupts"] += 1

    def take_in(self, output):
        super().take_in(output)
        scheduler = self.engine.scheduler
        [*_, records] = self.engine.log.since(self.num_steps)
        self.num_steps = output.stats.step
        self.state.apply_step(records)
        assert self.state.snapshot() == scheduler_snapshot(scheduler), "the log misses a change"
        for seq in scheduler.running:
            if not seq.is_prefilling and not self.config["async_scheduling"]:
                most = scheduler.manager.blocks_for(seq.num_tokens)
                assert len(seq.table.block_ids) <= most, "a block for drafts was not given back"


def with_drafts(scenario, kind, most, interrupted_every):
    config = scenario["config"] | {"async_scheduling": False} if interrupted_every else {}
    more = {"kind": kind, "most": most, "interrupted_every": interrupted_every}
    return scenario | more | ({"config": config} if config else {})


def drafted(scenarios_of):
    return st.builds(
        with_drafts,
        scenarios_of,
        st.sampled_from(KINDS),
        st.sampled_from([1, 3, 7]),
        st.sampled_from([0, 0, 0, 4, 7]),
    )


def check_drafts(models, backend, scenario):
    """Run a scenario without and with drafts, and compare everything that a caller sees."""
    model, num_host = models[scenario["model"]], scenario["num_host_blocks"]
    config, kind = scenario["config"], scenario["kind"]
    plain = Run(new_engine(model, config, num_host, backend), scenario)
    outputs = {
        (plain.numbers[index], choice): tokens for (index, choice), tokens in plain.tokens.items()
    }
    drafter = Oracle(outputs, kind, most=scenario["most"], vocab_size=VOCAB)
    engine = new_engine(model, config, num_host, backend, drafter)
    engine.runner = InterruptedRunner(engine.runner, scenario["interrupted_every"])
    run = DraftedRun(engine, scenario)
    # A failing request ends its step, and the others compute their tokens again.
    is_again = any(each.engine.stats.num_preemptions or each.failed for each in (plain, run))
    has_equal_bits = backend == "jit" or (backend == "cupy-emulated" and not is_again)
    aborted = run.aborted | plain.aborted
    assert run.failed - aborted == plain.failed - aborted
    for key, tokens in plain.tokens.items():
        index, other = key[0], run.tokens.get(key, [])
        num_choices = scenario["requests"][index][1]["n"]
        if index in plain.failed and num_choices == 1 and index not in aborted:
            # The last step may fail before it hands out tokens that a grammar forces.
            drawn = [each.requests[index].sequences[0].output_ids for each in (plain, run)]
            assert drawn[0] == drawn[1], f"{kind} drafts changed tokens of {key}"
        is_cut = index in aborted or index in plain.failed
        num_common = min(len(tokens), len(other)) if is_cut else None
        assert other[:num_common] == tokens[:num_common], f"{kind} drafts changed tokens of {key}"
        if has_equal_bits and key in run.logprobs:
            assert run.logprobs[key][:num_common] == plain.logprobs[key][:num_common]
        if index not in aborted:
            assert run.reasons.get(key) == plain.reasons.get(key)
    count(run, drafter)


def count(run, drafter):
    stats = run.engine.scheduler.speculation.stats
    assert stats.num_draft_tokens == drafter.num_drafts
    assert stats.num_accepted_tokens == drafter.num_accepted
    assert sum(stats.num_accepted_by_position) == drafter.num_accepted
    seen["scenarios with drafts"] += 1
    requests = run.scenario["requests"]
    names = {number: index for index, number in run.numbers.items()}
    segments = run.engine.log.segments()
    for kind, *fields in chain.from_iterable(chain.from_iterable(s.steps for s in segments)):
        if kind == "verify":
            seq, _, num_drafts, num_kept = fields
            seen["drafts kept"] += num_kept > 0
            seen["drafts dropped"] += num_kept < num_drafts
            seen["drafts all kept"] += num_kept == num_drafts
            params = requests[names[seq[0]]][1]
            seen["constrained drafts"] += "rule" in params
            seen["logprobs of drafts"] += params["logprobs"] is not None and num_kept > 0
        elif kind in ("trim", "revert"):
            seen[kind + "s"] += 1


def check_plain(models, backend, scenario):
    check_drafts(models, backend, scenario)


def check_hybrid(models, backend, scenario):
    size = state_bytes(models[scenario["model"]], backend)
    check_drafts(models, backend, in_bytes(scenario, size))


def check_random(models, backend, check, scenarios_of, num_scenarios, often):
    """Check so many scenarios, and more while cases that occur ``often`` are too rare."""

    @given(scenario=drafted(scenarios_of))
    @settings(max_examples=num_scenarios)
    def check_scenarios(scenario):
        check(models, backend, scenario)

    check_until_seen(lambda run: run(), check_scenarios, seen, often)


BACKENDS = pytest.mark.parametrize("backend", ["numpy", pytest.param("jit", marks=needs_numba)])


@BACKENDS
def test_drafts_change_no_answer(tiny, backend):
    """The scheduler is the same with each backend, so the second one runs fewer scenarios."""
    count = settings().max_examples
    if count < 100:
        count = {"numpy": 25, "jit": 10}[backend]
    often = dict.fromkeys(OFTEN if backend == "numpy" else WITH_ANY_BACKEND, 2)
    check_random(tiny, backend, check_plain, scenarios(), count, often)


@BACKENDS
def test_drafts_change_no_answer_of_a_hybrid(hybrids, backend):
    count = settings().max_examples // 3
    if count < 33:
        count = {"numpy": 15, "jit": 6}[backend]
    often = dict.fromkeys(OF_HYBRIDS if backend == "numpy" else WITH_ANY_BACKEND, 2)
    check_random(hybrids, backend, check_hybrid, hybrid_scenarios(), count, often)


def with_room(scenario):
    """Return a scenario in which a GPU seldom computes a generated token again.

    Such a token has the bits of a prompt's token, and not the bits of a decode. So have the tokens
    of a run of forced tokens.
    """
    config = scenario["config"] | {"num_blocks": 200, "max_forced_run": 0}
    return scenario | {"config": config, "interrupted_every": 0}


@pytest.mark.slow
@needs_compiler
def test_drafts_change_no_answer_on_the_emulated_gpu(tiny):
    """Bits are equal too, because the engine has the setting ``batch_invariant``."""

    def check(models, backend, scenario):
        check_drafts(models, backend, with_room(scenario))

    count = 300 if settings().max_examples >= 1000 else 20
    often = dict.fromkeys(WITH_ANY_BACKEND, 2)
    check_random(tiny, "cupy-emulated", check, scenarios(), count, often)
