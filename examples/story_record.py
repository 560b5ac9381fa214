"""Tell a story in a chat, and fill a JSON record of it: a name, an animal, a place and an object.

An expression describes each answer, so the record is always complete. The bundled model has never
seen JSON and knows such sentences well. For other models, a JSON schema gives the whole record in
one answer (structured.py).

It needs llguidance: pip install '.[structured]'
"""

import json
import re

from mie import LLM, SamplingParams, StructuredOutputsParams

QUESTIONS = {
    "Who is the story about?": r"The story is about (?P<name>[A-Z][a-z]+) the (?P<animal>[a-z]+)\.",
    "Where does the story happen?": r"The story happens [a-z]+ the (?P<place>[a-z]+)\.",
    "What did {name} have?": r"{name} had an? (?P<object>[a-z]+)\.",
}


def told(llm: LLM, messages: list[dict[str, str]], question: str, **more) -> str:
    """Ask a question, and return the answer. The conversation then has both."""
    messages.append({"role": "user", "content": question})
    params = SamplingParams(temperature=0, max_tokens=256, **more)
    [output] = llm.chat(messages, params, use_tqdm=False)
    messages.append({"role": "assistant", "content": output.outputs[0].text})
    return output.outputs[0].text


if __name__ == "__main__":
    llm = LLM(model="bundled")
    for request in ("Mia the otter, the mill and a bell", "Tom the owl, the lake and a kite"):
        messages: list[dict[str, str]] = []
        print(told(llm, messages, f"Tell me a story about {request}."))
        record: dict[str, str] = {}
        for question, form in QUESTIONS.items():
            regex = form.replace("{name}", record.get("name", ""))
            structure = StructuredOutputsParams(regex=regex)
            question = question.format(**record)
            answer = told(llm, messages, question, structured_outputs=structure)
            record |= re.fullmatch(regex, answer).groupdict()
        print(json.dumps(record))
