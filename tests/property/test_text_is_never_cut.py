"""Check that an error at any line after a request's last step never cuts its text."""

import os
import random

import pytest
from audit import num_open_requests
from interrupts import Injector

import mie
from mie import LLM, SamplingParams
from mie.errors import RequestError, RequestFailedError

ROOT = os.path.dirname(mie.__file__)
PARTS = tuple(
    os.path.join(ROOT, name) for name in ("text", "frontend/answer.py", "frontend/processor.py")
)


def strike():
    raise ZeroDivisionError("injected")


class AfterTheLastStep:
    """Tells whether a line of the text's modules runs when the engine has no requests any more."""

    def __init__(self, llm):
        self.llm = llm
        self.has_begun = False

    def __call__(self, frame):
        has_requests = bool(self.llm.engine.requests)
        self.has_begun |= has_requests
        is_part = frame.f_code.co_filename.startswith(PARTS)
        return is_part and self.has_begun and not has_requests


def answers(outputs):
    return [[(c.text, c.token_ids, c.finish_reason) for c in o.outputs] for o in outputs]


@pytest.mark.parametrize(
    "options",
    [{}, {"stop": ["zzz", "e"], "n": 2}, {"logprobs": 2, "prompt_logprobs": 1}],
    ids=["plain", "stop-n", "logprobs"],
)
def test_an_error_after_the_last_step_never_cuts_the_text(options):
    llm = LLM("bundled", num_blocks=64, max_num_seqs=4, num_threads=1)
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, **options)
    prompts = ["Once upon a time"]
    expected = answers(llm.generate(prompts, params, use_tqdm=False))

    def generate():
        return llm.generate(prompts, params, use_tqdm=False)

    counting = Injector(strike, 0, counts=AfterTheLastStep(llm))
    counting.run(generate)
    assert counting.num_lines > 40
    count = None if os.environ.get("MIE_HYPOTHESIS") == "far" else 25
    lines = range(1, counting.num_lines + 1)
    if count is not None:
        lines = random.Random(1).sample(lines, min(count, len(lines)))
    num_told = 0
    for line in lines:
        faulty = Injector(strike, line, counts=AfterTheLastStep(llm))
        try:
            found = faulty.run(generate)
        except RequestFailedError as failed:
            num_told += 1
            [output] = failed.outputs
            assert output.finished, faulty.where
            assert output.error.endswith("injected"), faulty.where
        except (ZeroDivisionError, RequestError):
            num_told += 1  # raised in the caller's own code, so there is no answer
        else:
            assert answers(found) == expected, faulty.where
        assert faulty.where
        llm.loop.settle()
        assert not num_open_requests(llm), faulty.where
        assert not llm.has_work, faulty.where
        assert llm.engine.scheduler.manager.num_used == 0, faulty.where
    assert num_told > 5
    assert answers(generate()) == expected
