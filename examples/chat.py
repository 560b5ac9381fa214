"""Hold a conversation, and answer several conversations at once.

`LLM.chat` writes the messages with the model's own chat template.
"""

from mie import LLM, SamplingParams

STORY = {"role": "user", "content": "Tell me a story about Nora the hedgehog, the mill and a bell."}

if __name__ == "__main__":
    llm = LLM(model="bundled")
    params = SamplingParams(temperature=0.0, max_tokens=250)

    conversation = [{"role": "system", "content": "You are kind."}, STORY]
    [output] = llm.chat(conversation, params)
    story = output.outputs[0].text
    print(f"Story: {story}\n")

    # The next turn brings the whole conversation; the prefix cache has all but the new part.
    conversation += [
        {"role": "assistant", "content": story},
        {"role": "user", "content": "Who is the story about?"},
    ]
    [output] = llm.chat(conversation, params, use_tqdm=False)
    print(f"Answer: {output.outputs[0].text}")
    print(f"Cached: {output.num_cached_tokens} of {len(output.prompt_token_ids)} tokens\n")

    questions = ["Who are you?", "Tell me a story about Otto the owl, the lake and a lamp."]
    conversations = [[{"role": "user", "content": question}] for question in questions]
    for question, output in zip(questions, llm.chat(conversations, params), strict=True):
        print(f"{question} {output.outputs[0].text[:60]} ...")
