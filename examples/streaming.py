"""Print an answer while it is being written, and end it early.

`LLM.stream` yields the output after every token; leaving the loop ends the request and gives its
memory back.
"""

from contextlib import closing

from mie import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(model="bundled")
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=200)

    for output in llm.stream("Tell me a story about Mia the fox, the mill and a bell.", params):
        print(output.outputs[0].new_text, end="", flush=True)
    choice = output.outputs[0]
    print(f"\n[{len(choice.token_ids)} tokens, finish_reason={choice.finish_reason!r}]\n")

    num_sentences = 0
    with closing(llm.stream("Once upon a time", params)) as outputs:
        for output in outputs:
            piece = output.outputs[0].new_text
            print(piece, end="", flush=True)
            num_sentences += piece.count(".")
            if num_sentences == 2:
                break
    print(f"\n[stopped after {num_sentences} sentences; unfinished requests: {llm.has_work}]")
