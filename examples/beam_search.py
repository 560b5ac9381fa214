"""Search for the most likely continuations of a prompt.

The beams share the blocks of their prompt, and each computes one token a step.
"""

from mie import LLM, BeamSearchParams

PROMPTS = [
    {"prompt": "Tell me a story about Mia the fox, the mill and a bell."},
    {"prompt": "Once upon a time"},
]

if __name__ == "__main__":
    llm = LLM(model="bundled")
    params = BeamSearchParams(beam_width=4, max_tokens=24)

    outputs = llm.beam_search(PROMPTS, params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        print(f"Prompt: {prompt['prompt']!r}")
        for beam in output.sequences:
            print(f"  log-probability {beam.cum_logprob:7.3f}: {beam.text!r}")

    steps = [metric for metric in llm.get_metrics() if metric.name == "vllm:iteration_tokens_total"]
    print(f"Tokens computed: {steps[0].sum:.0f}")
