"""Check that a request has the same bytes in any process, with any threads.

Backend numpy promises it with ``batch_invariant=True``, and backend jit always.
"""

import json
import os

import pytest
from command_line import python

PROGRAM = """
import hashlib, json, sys
from mie import LLM, SamplingParams

num_threads, others, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
settings = {"backend": "jit"}
if sys.argv[4] == "numpy":
    settings = {"backend": "numpy", "batch_invariant": True}
with open(path, "w") as file:
    llm = LLM("bundled", num_blocks=256, num_threads=num_threads, trace=file, **settings)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=24, logprobs=5, prompt_logprobs=2)
    prompts = ["Tell me a story about Mia the fox, the mill and a red kite."]
    prompts += [f"Once upon a time, {i} owls" for i in range(others)]
    output = llm.generate(prompts, params, use_tqdm=False)[0]
rows = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
bits = [sorted((id, value.logprob.hex()) for id, value in row.items()) for row in rows]
print(hashlib.sha256(json.dumps([output.outputs[0].token_ids, bits]).encode()).hexdigest())
"""

CASES = {
    "one thread": (1, 0, {}),
    "two threads beside others": (2, 7, {}),
    "five threads, and BLAS has three": (5, 2, {"OPENBLAS_NUM_THREADS": "3"}),
}


@pytest.mark.parametrize(
    ("backend", "core"),
    [
        ("jit", ""),
        pytest.param("numpy", "", marks=pytest.mark.slow),
        pytest.param("numpy", "Haswell", marks=pytest.mark.slow),
    ],
)
def test_any_process_and_any_number_of_threads_gives_the_same_bytes(backend, core, tmp_path):
    digests, numerics = {}, []
    for name, (num_threads, others, variables) in CASES.items():
        environment = {k: v for k, v in os.environ.items() if not k.startswith("OPENBLAS_")}
        environment |= variables | ({"OPENBLAS_CORETYPE": core} if core else {})
        path = tmp_path / f"{name}.jsonl"
        words = (str(num_threads), str(others), path, backend)
        digests[name] = python("-c", PROGRAM, *words, env=environment).stdout
        with path.open() as file:
            numerics.append(json.loads(file.readline())["numerics"])
    assert len(set(digests.values())) == 1, digests
    assert all(each == numerics[0] for each in numerics)
    assert numerics[0]["batch_invariant"] is True
    assert numerics[0]["backend"] == backend
    if core and numerics[0]["kernels"] != "unknown":
        assert numerics[0]["kernels"] == core
