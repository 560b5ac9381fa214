"""Complete several prompts at once.

The same lines run on vLLM with another import and another model.
"""

from mie import LLM, SamplingParams

prompts = [
    "Once upon a time",
    "Tell me a story about Mia the fox, the garden and a kite.",
    "One day",
]
sampling_params = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=60, seed=1)

if __name__ == "__main__":
    llm = LLM(model="bundled")
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        print(f"Prompt:    {output.prompt!r}")
        print(f"Generated: {output.outputs[0].text!r}")
        print("-" * 60)
