"""Let the model answer in a given form: a sentence of a regular expression, and a JSON record.

The form is always right. The content is the choice of the model, and the model has never seen JSON.

It needs llguidance: pip install '.[structured]'
"""

import json

from mie import LLM, SamplingParams, StructuredOutputsParams

STORY = "Tell me a story about Mia the otter, the mill and a bell."
REGEX = r"The story is about (Mia|Tom|Nora) the (fox|otter|owl)\."
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Mia", "Tom", "Nora"]},
        "animal": {"enum": ["fox", "otter", "owl"]},
        "place": {"enum": ["garden", "lake", "mill"]},
        "thing": {"enum": ["bell", "kite", "lamp"]},
    },
    "required": ["name", "animal", "place", "thing"],
    "additionalProperties": False,
}

if __name__ == "__main__":
    llm = LLM(model="bundled")
    messages = [{"role": "user", "content": STORY}]
    [output] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=256), use_tqdm=False)
    story = output.outputs[0].text
    print(story)

    messages += [
        {"role": "assistant", "content": story},
        {"role": "user", "content": "Who is the story about?"},
    ]
    for structure in (StructuredOutputsParams(regex=REGEX), StructuredOutputsParams(json=SCHEMA)):
        params = SamplingParams(temperature=0, max_tokens=100, structured_outputs=structure)
        [output] = llm.chat(messages, params, use_tqdm=False)
        print(f"Answer: {output.outputs[0].text}")
    print(f"Its place: {json.loads(output.outputs[0].text)['place']}")
