"""Choose among labels by how likely the model finds each of them after a question.

`prompt_logprobs` returns the log-probability of every token of the prompt, so a label that is part
of the prompt has a score, and nothing needs to be generated.
"""

from mie import LLM, SamplingParams

QUESTIONS = [
    ("Mia the fox keeps a bell at the mill. Where is the bell?", "The bell is", "at the mill"),
    ("Tom the owl has a lamp in the garden. Where is the lamp?", "The lamp is", "in the garden"),
    ("Paul the bear hides a kite by the lake. Where is the kite?", "The kite is", "by the lake"),
]
LABELS = ["at the mill", "in the garden", "by the lake"]


def scores(llm: LLM, question: str, start: str) -> dict[str, float]:
    """The log-probability of each label as the end of an answer that begins with ``start``."""
    tokenizer = llm.get_tokenizer()
    start_ids = tokenizer.encode(f"{question}\n{start}")
    label_ids = [tokenizer.encode(f" {label}.", add_special_tokens=False) for label in LABELS]
    prompts = [{"prompt_token_ids": start_ids + ids} for ids in label_ids]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    return {
        label: sum(
            row[token_id].logprob
            for row, token_id in zip(output.prompt_logprobs[-len(ids) :], ids, strict=True)
        )
        for label, ids, output in zip(LABELS, label_ids, outputs, strict=True)
    }


if __name__ == "__main__":
    model = LLM(model="bundled")
    num_right = 0
    for question, start, expected in QUESTIONS:
        found = scores(model, question, start)
        best = max(found, key=found.get)
        num_right += best == expected
        print(question)
        print("  " + ", ".join(f"{label} {score:.2f}" for label, score in found.items()))
        print(f"  best: {best}, expected: {expected}")
    print(f"{num_right} of {len(QUESTIONS)} right")
