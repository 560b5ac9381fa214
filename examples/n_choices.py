"""Draw several answers to one prompt, and draw them again from the same seed.

The choices share the blocks of their prompt. A seed fixes all of them, in every batch.
"""

from mie import LLM, SamplingParams

PROMPT = "Tell me a story about Tom the owl, the lake and a kite."

if __name__ == "__main__":
    llm = LLM(model="bundled")
    params = SamplingParams(n=4, seed=7, temperature=0.9, top_p=0.95, max_tokens=40, logprobs=0)

    [output] = llm.generate(PROMPT, params)
    for choice in sorted(output.outputs, key=lambda choice: -choice.cumulative_logprob):
        print(f"[{choice.index}] log-probability {choice.cumulative_logprob:7.2f}: {choice.text!r}")

    # Again, this time in the company of another request.
    [again, _] = llm.generate([PROMPT, "Once upon a time"], [params, SamplingParams(max_tokens=40)])
    texts = [choice.text for choice in output.outputs]
    print(f"The same seed gave the same texts: {texts == [c.text for c in again.outputs]}")
