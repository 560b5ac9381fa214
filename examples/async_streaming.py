"""Stream several answers at once from asyncio, each as it is being written.

With DELTA outputs each one holds only the new part. All requests run together in one engine.
"""

import asyncio

from mie import AsyncEngineArgs, AsyncLLM, SamplingParams
from mie.config.params.sampling import RequestOutputKind

PROMPTS = [
    "Tell me a story about Mia the fox, the mill and a bell.",
    "Tell me a story about Tom the owl, the lake and a kite.",
    "Once upon a time",
]


async def stream(engine: AsyncLLM, request_id: str, prompt: str) -> str:
    """Print the pieces of one answer and return its text."""
    params = SamplingParams(
        temperature=0.7, seed=3, max_tokens=40, output_kind=RequestOutputKind.DELTA
    )
    text = ""
    async for output in engine.generate(prompt, params, request_id=request_id):
        for choice in output.outputs:
            text += choice.text
            print(f"{request_id}: {choice.text!r}")
    return text


async def main() -> None:
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model="bundled"))
    try:
        jobs = [stream(engine, f"request-{i}", prompt) for i, prompt in enumerate(PROMPTS)]
        texts = await asyncio.gather(*jobs)
    finally:
        engine.shutdown()
    for prompt, text in zip(PROMPTS, texts, strict=True):
        print(f"\nPrompt: {prompt!r}\nAnswer: {text!r}")


if __name__ == "__main__":
    asyncio.run(main())
