"""Let the model call functions of this program, and answer with their results.

``tool_choice="required"`` makes the answer a call of one of the functions, with arguments that its
schema accepts. A model that is trained for tools decides with "auto", the default.

It needs llguidance: pip install '.[structured]'
"""

import json

from mie import LLM, SamplingParams


def weather(place: str) -> str:
    """Return the weather at a place."""
    return f"There is rain at the {place}."


def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
PARAMETERS = {weather: {"place": {"enum": ["lake", "mill"]}}, add: {"a": NUMBER, "b": NUMBER}}
FUNCTIONS = {function.__name__: function for function in PARAMETERS}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": function.__name__,
            "description": function.__doc__,
            "parameters": {"type": "object", "properties": each, "required": [*each]},
        },
    }
    for function, each in PARAMETERS.items()
]

if __name__ == "__main__":
    llm = LLM(model="bundled")
    params = SamplingParams(temperature=0, max_tokens=200)
    messages = [{"role": "user", "content": "How is the weather at the mill?"}]
    [output] = llm.chat(messages, params, tools=TOOLS, tool_choice="required", use_tqdm=False)
    calls = output.outputs[0].tool_calls
    messages.append({"role": "assistant", "tool_calls": [call.as_message() for call in calls]})
    for call in calls:
        result = FUNCTIONS[call.name](**json.loads(call.arguments))
        print(f"{call.name}({call.arguments}) = {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

    [output] = llm.chat(messages, params, tools=TOOLS, use_tqdm=False)
    print(f"Answer: {output.outputs[0].text}")
