"""Check words that no training document has, and requests about a story in a chat.

`evaluate.py --unseen` runs it. The words are in `tests/data/tiny_unseen.json`, 30 of each kind. The
first stories of the chats are about held-out prompts, every other one with an unseen name.
"""

import difflib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import evaluate
from evaluate import KINDS, MAX_TOKENS, Lists, Story
from words import DATA, UNSEEN

KEPT = ("words_are_known", "only_the_prompts_words", "names_keep_their_animals", "words_come_back")
SHORT = ("sentences_are_formed", "quotes_are_closed", "words_are_known", "only_the_prompts_words")


# -- words ----------------------------------------------------------------------------------------


def article(word: str) -> str:
    """Return "a" or "an"."""
    return "an" if word[0].lower() in "aeiou" else "a"


def exchange(text: str, old: str, new: str) -> str:
    """Return the text with another word, and with the article that fits it."""
    whole = rf"(?<!\w){re.escape(old)}(?!\w)"
    text = re.sub(rf"\b([Aa])n? (?={whole})", lambda m: m[1] + article(new)[1:] + " ", text)
    return re.sub(whole, lambda _: new, text)


def with_word(facts: Mapping[str, Any], kind: str, word: str) -> dict[str, Any]:
    """Return the facts of a prompt with another word of a kind, such as "names"."""
    key = kind.removesuffix("s")
    texts = {t: exchange(facts[t], facts[key], word) for t in ("prompt", "reference")}
    return {**facts, **texts, key: word}


def unseen_prompts(prompts: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return one prompt for each unseen word by kind, and prompts of four unseen words."""
    plain = [facts for facts in prompts if not facts["friend"]]
    found: dict[str, list[dict[str, Any]]] = {}
    for kind in KINDS:
        base, plain = plain[: len(UNSEEN[kind])], plain[len(UNSEEN[kind]) :]
        found[kind] = [with_word(f, kind, w) for f, w in zip(base, UNSEEN[kind], strict=True)]
    found["all four"] = []
    for index, facts in enumerate(found["names"]):
        for kind in ("animals", "places", "objects"):
            facts = with_word(facts, kind, UNSEEN[kind][index])
        found["all four"].append(facts)
    return found


def plainly(text: str, facts: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return text and facts with a plain word in place of each unseen one.

    The rules of `evaluate.py` know only words of English letters.
    """
    facts = dict(facts)
    for kind in KINDS:
        key = kind.removesuffix("s")
        word = facts[key]
        plain = "Zimpel" if kind == "names" else "z" + key
        if kind != "names" and article(word) == "an":
            plain = "o" + plain
        text = re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", plain, text)
        facts[key] = plain
    used = re.search(r"\b(she|he|her|his)\b", text.lower())
    facts["pronoun"] = "she" if used and used[1] in ("she", "her") else "he"
    return text, facts


def faults(text: str, reason: str, facts: Mapping[str, Any], lists: Lists) -> dict[str, str]:
    """Return the faults of a story whose prompt may have unseen words."""
    text, facts = plainly(text.strip(), facts)
    story = Story(text=text, finish_reason=reason, facts=facts, lists=lists)
    return evaluate.faults(story)


def word_report(
    llm: Any, prompts: list[dict[str, Any]], lists: Lists
) -> tuple[dict[str, Any], list[str]]:
    """Return the number of words kept and of stories right in every respect, and the failures."""
    report, failures = {}, []
    for kind, asked in unseen_prompts(prompts).items():
        texts = evaluate.generate(llm, asked, temperature=0)
        found = [faults(t, r, f, lists) for (t, r), f in zip(texts, asked, strict=True)]
        for facts, (text, _), wrong in zip(asked, texts, found, strict=True):
            if wrong:
                failures.append(f"{kind}: {facts['prompt']}\n  {wrong}\n  {text.strip()}\n")
        report[kind] = {
            "prompts": len(asked),
            "kept": sum(not any(rule in wrong for rule in KEPT) for wrong in found),
            "right": sum(not wrong for wrong in found),
        }
    return report, failures


# -- chats ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Turn:
    """An answer to a request about a story."""

    answer: str
    reason: str
    before: str
    facts: Mapping[str, Any]
    lists: Lists

    def wrong(self, *rules: str) -> dict[str, str]:
        """Return the faults of the answer, of these rules only or of all."""
        found = faults(self.answer, self.reason, self.facts, self.lists)
        return {rule: fault for rule, fault in found.items() if not rules or rule in rules}

    def has(self, *keys: str) -> bool:
        """Return whether the answer has the story's words of these kinds."""
        return all(
            re.search(rf"(?<!\w){re.escape(self.facts[k])}(?!\w)", self.answer) for k in keys
        )

    @property
    def sentences(self) -> int:
        """The number of sentences of the answer."""
        return len(evaluate.BETWEEN_SENTENCES.split(self.answer))


def is_shorter(turn: Turn) -> bool:
    """Require one to four sentences with all four words."""
    short = turn.sentences <= 4 and 2 * len(turn.answer) < len(turn.before)
    return short and turn.has("name", "animal", "place", "object") and not turn.wrong(*SHORT)


def is_another(turn: Turn) -> bool:
    """Require a story that is right in every respect, and mostly new."""
    old = evaluate.BETWEEN_SENTENCES.split(turn.before)
    same = [s for s in evaluate.BETWEEN_SENTENCES.split(turn.answer) if s in old]
    return not turn.wrong() and 2 * len(same) < turn.sentences


def is_renamed(turn: Turn) -> bool:
    """Require the same story with the new name only."""
    old, new = turn.facts["old_name"], turn.facts["name"]
    wanted = exchange(turn.before, old, new).split()
    ratio = difflib.SequenceMatcher(None, wanted, turn.answer.split(), autojunk=False).ratio()
    gone = not re.search(rf"(?<!\w){re.escape(old)}(?!\w)", turn.answer)
    return gone and ratio > 0.95 and not turn.wrong(*KEPT)


def goes_on(turn: Turn) -> bool:
    """Require one to six well-formed sentences that name something of the story and are new."""
    about = any(turn.has(key) for key in ("name", "animal", "object"))
    new = turn.answer not in turn.before
    return turn.sentences <= 6 and about and new and not turn.wrong(*SHORT)


def answers(*keys: str) -> Callable[[Turn], bool]:
    """Return a check that a short answer has the words of these kinds."""
    return lambda turn: turn.sentences == 1 and turn.has(*keys) and not turn.wrong(*SHORT)


def only_knows_stories(turn: Turn) -> bool:
    """Require that the model says what it can do."""
    return "I only know" in turn.answer and "stories" in turn.answer


CHECKS: Mapping[str, Callable[[Turn], bool]] = {
    "make it shorter": is_shorter,
    "tell me another": is_another,
    "change the name": is_renamed,
    "what happened next": goes_on,
    "anything else": only_knows_stories,
}
CHATS = {
    kind: [(request, answers(*keys) if keys else CHECKS[kind]) for request, *keys in rows]
    for kind, rows in json.loads((DATA / "tiny_chats.json").read_text(encoding="utf-8")).items()
}
"""The requests by kind, and the check of their answers: their own words, or one for the kind."""
NEW_NAMES = ("Otto", "Mia", "Thandiwe", "Björn", "Leilani")


def chat_report(
    llm: Any, prompts: list[dict[str, Any]], lists: Lists
) -> tuple[dict[str, Any], list[str]]:
    """Return the number of right answers to each kind of request, and the failures."""
    from mie import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    turns = [(kind, *turn) for kind, asked in CHATS.items() for turn in asked]
    plain = [facts for facts in prompts if not facts["friend"]][-len(turns) :]
    heads, wishes, cast = [], [], []
    for index, facts in enumerate(plain):
        named = with_word(facts, "names", UNSEEN["names"][index]) if index % 2 else facts
        new = NEW_NAMES[index % 5]
        wish = turns[index][1].format(name=named["name"], new=new)
        renamed = {"old_name": named["name"], "name": new} if "{new}" in turns[index][1] else {}
        heads.append(f"<|user|>{named['prompt']}<|assistant|>")
        wishes.append(f"<|eos|><|user|>{wish}<|assistant|>")
        cast.append({**named, **renamed})
    told = [out.outputs[0].text for out in llm.generate(heads, params)]
    chats = [a + b + c for a, b, c in zip(heads, told, wishes, strict=True)]
    outputs = [out.outputs[0] for out in llm.generate(chats, params)]
    right, failures = dict.fromkeys(CHATS, 0), []
    for (kind, _, check), before, chat, facts, out in zip(
        turns, told, chats, cast, outputs, strict=True
    ):
        turn = Turn(
            answer=out.text, reason=out.finish_reason, before=before, facts=facts, lists=lists
        )
        good = out.finish_reason == "stop" and check(turn)
        right[kind] += good
        if not good:
            failures.append(f"{kind}: {chat}\n  {out.text}\n")
    return {k: {"requests": len(CHATS[k]), "right": right[k]} for k in CHATS}, failures


def measure(llm: Any, prompts: list[dict[str, Any]], lists: Lists) -> dict[str, Any]:
    """Return the numbers of words and requests, and print the failures."""
    kept, kept_failures = word_report(llm, prompts, lists)
    chats, chat_failures = chat_report(llm, prompts, lists)
    print(*kept_failures, *chat_failures, sep="\n")
    return {"words": kept, "requests": chats}
