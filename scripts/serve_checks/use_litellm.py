"""Chat and complete through litellm, in OpenAI's and in Anthropic's interface.

python use_litellm.py URL KEY
"""

import sys

import litellm

url, key = sys.argv[1:]
litellm.suppress_debug_info = True
messages = [{"role": "user", "content": "Tell me a story about an otter."}]
openai = {"model": "openai/bundled", "api_base": f"{url}/v1", "api_key": key}
common = {"messages": messages, "temperature": 0, "max_tokens": 16}

whole = litellm.completion(**openai, **common)
text = whole.choices[0].message.content
assert text
assert whole.usage.completion_tokens == 16

stream = litellm.completion(**openai, **common, stream=True, stream_options={"include_usage": True})
assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == text

for streams in (False, True):
    answer = litellm.completion(
        model="anthropic/bundled", api_base=url, api_key=key, **common, stream=streams
    )
    if streams:
        pieces = [chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices]
        assert "".join(pieces) == text
    else:
        assert answer.choices[0].message.content == text

completion = litellm.text_completion(
    model="text-completion-openai/bundled",
    api_base=f"{url}/v1",
    api_key=key,
    prompt="Once upon a time",
    max_tokens=8,
    temperature=0,
)
assert completion.choices[0].text

try:
    litellm.completion(**openai, **{**common, "max_tokens": 10**6})
except litellm.exceptions.BadRequestError:
    pass
else:
    raise AssertionError("an answer longer than the context was not refused")
