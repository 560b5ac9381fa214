"""Ask several questions about one text. The text is computed once.

The tokens that prompts have in common are found in the prefix cache. It changes no result: greedy
answers with it and without it are equal.
"""

from mie import LLM, SamplingParams

STORY = (
    "Once upon a time, a young fox called Mia lived at the mill. The big wheel turned round and "
    "round. She never left home without a bell. It rang with a clear sound. One night a friendly "
    "baker lost his way in the fog. Mia rang the bell until he found the mill. That is why "
    "everyone at the mill knows Mia, the fox with the bell."
)
QUESTIONS = ["Who is the story about?", "Where does the story happen?", "What did Mia have?"]
OPENING = [
    {"role": "user", "content": "Tell me a story about Mia the fox, the mill and a bell."},
    {"role": "assistant", "content": STORY},
]
CONVERSATIONS = [[*OPENING, {"role": "user", "content": question}] for question in QUESTIONS]

if __name__ == "__main__":
    params = SamplingParams(temperature=0.0, max_tokens=40)

    plain = LLM(model="bundled", enable_prefix_caching=False)
    expected = [output.outputs[0].text for output in plain.chat(CONVERSATIONS, params)]

    cached = LLM(model="bundled", enable_prefix_caching=True)
    cached.chat(CONVERSATIONS[0], params)  # computes the story
    outputs = cached.chat(CONVERSATIONS, params)

    for question, output in zip(QUESTIONS, outputs, strict=True):
        print(f"{question} {output.outputs[0].text}")
        print(f"  {output.num_cached_tokens} of {len(output.prompt_token_ids)} tokens cached")
    same = [output.outputs[0].text for output in outputs] == expected
    print(f"The answers are the same as without the cache: {same}")
