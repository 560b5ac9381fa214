"""Evaluate the bundled model on held-out prompts: perplexity, and the share of correct stories.

    python scripts/tiny_model/evaluate.py [--temperature 0.7] [--json report.json]
    python scripts/tiny_model/evaluate.py --unseen

The second form checks words that no training document has, and requests about a story.

It reads prompts and word lists from `tests/data` and judges the text by its own rules. It shares no
code with the writer of the training text.
"""

import argparse
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[2] / "tests" / "data"
KINDS = ("names", "animals", "places", "objects")
FEMALE, MALE = {"she", "her", "hers", "herself"}, {"he", "him", "his", "himself"}
BETWEEN_SENTENCES = re.compile(r"""(?<=[.!?])\s+(?="?[A-Z])|(?<=[.!?]")\s+(?="?[A-Z])""")
WORD = re.compile(r"[A-Za-z]+(?:'[a-z]+)?")
DANGLING = re.compile(r"""\b(?:a|an|the|of|and|or|my|your|very)[.,!?;:"]""")
NO_NOUN = re.compile(
    r"""\b(?:a|an|the|my|your) (?:a|an|the|and|or|of|to|in|at|by|on|was|is|were|are|had|has|did|"""
    r"""said|asked|she|he|they|it|but|so|then|who|that|not)\b"""
)
ENDS_SENTENCE = re.compile(r"""[.!?]"?$""")
MAX_TOKENS = 400


@dataclass(frozen=True, kw_only=True)
class Lists:
    """The words that may occur: four kinds of prompt words, and all others."""

    names: frozenset[str]
    animals: frozenset[str]
    places: frozenset[str]
    objects: frozenset[str]
    words: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class Story:
    """A story to judge, the prompt's facts, and how the text ended."""

    text: str
    finish_reason: str | None
    facts: Mapping[str, Any]
    lists: Lists

    @property
    def words(self) -> list[str]:
        """The words in order, as written."""
        return WORD.findall(self.text)

    @property
    def sentences(self) -> list[str]:
        """The sentences in order."""
        return BETWEEN_SENTENCES.split(self.text.strip())


# -- rules: each returns a description of the fault, or nothing ------------------------------------


def ends_by_itself(story: Story) -> str | None:
    """Require that the model writes its end token within the limit."""
    return None if story.finish_reason == "stop" else f"ended by {story.finish_reason}"


def is_a_story(story: Story) -> str | None:
    """Require at least five sentences and sixty words, in one paragraph."""
    if len(story.sentences) < 5 or len(story.words) < 60:
        return f"too short: {len(story.sentences)} sentences, {len(story.words)} words"
    return "more than one paragraph" if "\n" in story.text.strip() else None


def sentences_are_formed(story: Story) -> str | None:
    """Require a capital first, an end mark last, and no stray spaces or marks."""
    text = story.text.strip()
    if not ENDS_SENTENCE.search(text):
        return "the last sentence has no end"
    stray = re.search(r"\s[,.!?;:]|[,.!?;:]{2}|\s\s|[^A-Za-z\s.,!?:'\"-]", text)
    if stray:
        return f"stray {stray.group()!r}"
    starts = [text, *(text[m.end() :] for m in re.finditer(r"[.!?]\s+|\.\"\s+", text))]
    for start in starts:
        if not re.match(r"\"?[A-Z]", start):
            return f"no capital at {start[:20]!r}"
    return None


def quotes_are_closed(story: Story) -> str | None:
    """Require that quotation marks open after a space and close after a mark, in turn."""
    opened = False
    padded = f" {story.text.strip()} "
    for match in re.finditer('"', padded):
        before, after = padded[match.start() - 1], padded[match.end()]
        good = (before in ".,!?" and after == " ") if opened else (before == " " and after != " ")
        if not good:
            return f"quotation mark at {padded[max(0, match.start() - 12) : match.end() + 8]!r}"
        opened = not opened
    return "a quotation is not closed" if opened else None


def words_are_known(story: Story) -> str | None:
    """Allow only English words of the training text and the prompt's words."""
    facts = story.facts
    known = set(story.lists.words)
    known |= {str(facts[k]).lower() for k in ("name", "animal", "place", "object")}
    known |= {str(facts[k]).lower() for k in ("friend", "friend_animal") if facts[k]}
    unknown = [word for word in story.words if word.lower() not in known]
    return f"words {unknown[:3]}" if unknown else None


def nothing_repeats(story: Story) -> str | None:
    """Refuse a doubled word, or a sentence that occurs twice."""
    lowered = [word.lower() for word in story.words]
    for index in range(1, len(lowered)):
        text = story.words[index - 1] + " " + story.words[index]
        if lowered[index] == lowered[index - 1] and text in story.text:
            return f"{lowered[index]!r} twice in a row"
    twice = [s for s, count in Counter(story.sentences).items() if count > 1]
    return f"sentence twice: {twice[0]!r}" if twice else None


def articles_fit(story: Story) -> str | None:
    """Require "a" before a consonant and "an" before a vowel."""
    for article, word in re.findall(r"\b([Aa]n?) ([A-Za-z]+)", story.text):
        vowel = word[0].lower() in "aeiou" or word in ("hour", "honest")
        if vowel != (article.lower() == "an"):
            return f"{article} {word}"
    return None


def small_words_lead_on(story: Story) -> str | None:
    """Require a noun after an article and none after a pronoun.

    No sentence may end in "and" or "the".
    """
    text = story.text.lower()
    match = DANGLING.search(text) or NO_NOUN.search(text)
    if match:
        return f"{match.group()!r}"
    for pronoun, word in re.findall(r"\b(she|he|it|they) ([a-z]+)", text):
        if any(word in getattr(story.lists, kind) for kind in KINDS):
            return f"{pronoun} {word}"
    return None


def only_the_prompts_words(story: Story) -> str | None:
    """Allow no name, animal, place or object but those of the prompt."""
    facts = story.facts
    allowed = {
        "names": {facts["name"], facts["friend"]},
        "animals": {facts["animal"], facts["friend_animal"]},
        "places": {facts["place"]},
        "objects": {facts["object"]},
    }
    for kind in KINDS:
        for word in story.words:
            form = word if kind == "names" else word.lower()
            if form in getattr(story.lists, kind) and form not in allowed[kind]:
                return f"{form} is not in the prompt"
    return None


def names_keep_their_animals(story: Story) -> str | None:
    """Require that X is the prompt's animal in every "X the Y" and "a Y named X"."""
    facts = story.facts
    kind = {facts["name"]: facts["animal"], facts["friend"]: facts["friend_animal"]}
    pairs = re.findall(r"\b([A-Z][a-z]+) the ([a-z]+)", story.text)
    pairs += [(n, a) for a, n in re.findall(r"([a-z]+) (?:named|called) ([A-Z][a-z]+)", story.text)]
    for name, animal in pairs:
        if name in kind and animal in story.lists.animals and animal != kind[name]:
            return f"{name} is not a {animal}"
    return None


def pronouns_agree(story: Story) -> str | None:
    """Require that the hero is "she" or "he" throughout, and that no other figure has a pronoun."""
    wrong = MALE if story.facts["pronoun"] == "she" else FEMALE
    used = wrong & {word.lower() for word in story.words}
    return f"pronoun {sorted(used)[0]!r}" if used else None


def words_come_back(story: Story) -> str | None:
    """Require each of the four words at least twice, and all of them in the last four sentences."""
    count = Counter(word.lower() for word in story.words)
    end = {word.lower() for word in WORD.findall(" ".join(story.sentences[-4:]))}
    for key in ("name", "animal", "place", "object"):
        word = story.facts[key].lower()
        if count[word] < 2:
            return f"{word!r} {count[word]} times only"
        if word not in end:
            return f"{word!r} does not come back at the end"
    friend = story.facts["friend"]
    return f"{friend!r} is missing" if friend and not count[friend.lower()] else None


RULES: Sequence[Callable[[Story], str | None]] = (
    ends_by_itself,
    is_a_story,
    sentences_are_formed,
    quotes_are_closed,
    words_are_known,
    nothing_repeats,
    articles_fit,
    small_words_lead_on,
    only_the_prompts_words,
    names_keep_their_animals,
    pronouns_agree,
    words_come_back,
)


def faults(story: Story) -> dict[str, str]:
    """Return the faults of the story, by rule. A correct story has no faults."""
    found = ((rule.__name__, rule(story)) for rule in RULES)
    return {name: fault for name, fault in found if fault}


def longest_silence(story: Story) -> str:
    """Return the longest stretch of text without a mention of one of the four words."""
    stretches = [
        stretch
        for key in ("name", "animal", "place", "object")
        for stretch in re.split(rf"(?i)\b{re.escape(story.facts[key])}\b", story.text)[:-1]
    ]
    return max(stretches, key=len, default="")


# -- data and the engine --------------------------------------------------------------------------


def read_lists(folder: Path) -> Lists:
    """Return the word lists of ``folder``."""
    raw = json.loads((folder / "tiny_words.json").read_text(encoding="utf-8"))
    return Lists(**{kind: frozenset(words.split()) for kind, words in raw.items()})


def read_prompts(folder: Path) -> list[dict[str, Any]]:
    """Return the held-out prompts of ``folder``."""
    lines = (folder / "tiny_heldout.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def prompt_text(facts: Mapping[str, Any]) -> str:
    """Return the text before the story, without the first token, which mie adds."""
    if facts["chat"]:
        return f"<|user|>{facts['prompt']}<|assistant|>"
    return facts["prompt"]


def generate(llm: Any, prompts: list[dict[str, Any]], temperature: float) -> list[tuple[str, str]]:
    """Return text and finish reason for each prompt."""
    from mie import SamplingParams

    params = SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS, seed=0)
    outputs = llm.generate([prompt_text(facts) for facts in prompts], params)
    return [(out.outputs[0].text, out.outputs[0].finish_reason) for out in outputs]


def perplexity(llm: Any, prompts: list[dict[str, Any]]) -> float:
    """Return the perplexity of the reference stories, each given its prompt."""
    from mie import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    heads = [prompt_text(facts) for facts in prompts]
    gaps = ["" if facts["chat"] else "\n" for facts in prompts]
    texts = [
        f"{head}{gap}{facts['reference']}<|eos|>"
        for head, gap, facts in zip(heads, gaps, prompts, strict=True)
    ]
    total, count = 0.0, 0
    for head, out in zip(heads, llm.generate(texts, params), strict=True):
        start = len(llm.tokenizer.encode(head))
        for token, entry in zip(
            out.prompt_token_ids[start:], out.prompt_logprobs[start:], strict=True
        ):
            total, count = total - entry[token].logprob, count + 1
    return math.exp(total / count)


def report(
    results: list[tuple[Story, dict[str, str]]], count_tokens: Callable[[str], int]
) -> dict[str, Any]:
    """Return the numbers of the model card."""
    silences = sorted(count_tokens(longest_silence(story)) for story, _ in results)
    right = [story for story, wrong in results if not wrong]
    return {
        "prompts": len(results),
        "right": len(right),
        "share": len(right) / len(results),
        "faults": dict(Counter(rule for _, wrong in results for rule in wrong)),
        "mean_words": sum(len(story.words) for story, _ in results) / len(results),
        "tokens_before_a_word_comes_back": {
            "median": silences[len(silences) // 2],
            "longest": silences[-1],
        },
    }


def judge(
    prompts: list[dict[str, Any]], texts: list[tuple[str, str]], lists: Lists
) -> list[tuple[Story, dict[str, str]]]:
    """Return each story with its faults."""
    stories = [
        Story(text=text.strip("\n"), finish_reason=reason, facts=facts, lists=lists)
        for facts, (text, reason) in zip(prompts, texts, strict=True)
    ]
    return [(story, faults(story)) for story in stories]


def measure(
    llm: Any, prompts: list[dict[str, Any]], lists: Lists, temperature: float
) -> dict[str, Any]:
    """Return the numbers of the held-out prompts, and print the stories with faults."""
    results = judge(prompts, generate(llm, prompts, temperature), lists)
    for story, wrong in results:
        if wrong:
            print(f"{story.facts['prompt']}\n  {wrong}\n  {story.text}\n")
    tokenizer = llm.tokenizer
    return {
        "perplexity": perplexity(llm, prompts),
        **report(results, lambda text: len(tokenizer.encode(text, add_special_tokens=False))),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--unseen", action="store_true", help="unseen words and requests instead")
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    args = parser.parse_args()

    from mie import LLM

    llm = LLM(model=args.model)
    prompts, lists = read_prompts(args.data), read_lists(args.data)
    if args.unseen:
        import unseen

        numbers = unseen.measure(llm, prompts, lists)
    else:
        numbers = measure(llm, prompts, lists, args.temperature)
    print(json.dumps(numbers, indent=2))
    if args.json:
        args.json.write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
