"""Write endless training documents for the bundled model from `tiny_grammar`.

A document is a list of `(text, learn)` segments. The model reads all of them and is trained to
write those with `learn` true. The special tokens are in the text by name.

A (name, object) or (animal, place) pair whose CRC-32 is a multiple of eight never occurs in a
training document. In the casts of the held-out prompts, both pairs are of that kind.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TypeVar

from train import tiny_grammar as g

BOS, EOS = "<|bos|>", "<|eos|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (BOS, EOS, SYSTEM, USER, ASSISTANT)

Segment = tuple[str, bool]
Option = TypeVar("Option")

_CHOICE = re.compile(r"\{([^{}]*)\}")
_SLOT = re.compile(r"<([a-z_]+)>")
_SENTENCE_START = re.compile(r"(^\"?|[.!?] )([a-z])")
_PRONOUNS = {
    True: {"she": "she", "her": "her", "hers": "hers", "him": "her", "herself": "herself"},
    False: {"she": "he", "her": "his", "hers": "his", "him": "him", "herself": "himself"},
}


def with_article(noun: str) -> str:
    """Return `noun` with "a" or "an" before it."""
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def preposition(place: str) -> str:
    """Return the preposition of a place."""
    return g.PLACES[place][0] if place in g.PLACES else g.MORE_PLACES[place]


@dataclass(frozen=True, kw_only=True)
class Cast:
    """The words of one story. A friend has a name and an animal, and other helpers are human."""

    name: str
    girl: bool
    animal: str
    place: str
    object: str
    helper: str
    later_helper: str
    friend: str | None = None
    friend_animal: str | None = None
    place_look: str = ""
    object_look: str = ""

    def slots(self) -> dict[str, str]:
        """Return the word for each ``<slot>`` of a template."""
        return {
            "name": self.name,
            "animal": self.animal,
            "place": self.place,
            "object": self.object,
            "a_animal": with_article(self.animal),
            "a_object": with_article(self.object_look + self.object),
            "in_place": f"{preposition(self.place)} the {self.place_look}{self.place}",
            "look": self.place_look,
            "a_helper": self.helper,
            "the_helper": self.later_helper,
            **_PRONOUNS[self.girl],
        }


def held_out(first: str, second: str) -> bool:
    """Return whether training must never see these two words in one cast."""
    return zlib.crc32(f"{first}|{second}".encode()) % 8 == 0


class Writer:
    """Writes documents with its own random generator."""

    def __init__(self, seed: int | str, *, unseen: bool = False, odd: float = 0.0) -> None:
        """Create a writer.

        With `unseen`, casts have only held-out pairs. `odd` is the share of words off the lists.
        """
        self.rng = Random(seed)
        self.unseen = unseen
        self.odd = odd

    # -- words ------------------------------------------------------------------------------

    def cast(self, *, friend: bool = False) -> Cast:
        """Return random words for a story, in keeping with the held-out rule."""
        while True:
            girl = self.rng.random() < 0.5
            name = self._name(girl)
            animal = self._word(g.ANIMALS, g.MORE_ANIMALS)
            place = self._word(g.PLACES, g.MORE_PLACES)
            thing = self._word(g.OBJECTS, g.MORE_OBJECTS)
            pairs = held_out(name, thing), held_out(animal, place)
            if all(pairs) if self.unseen else not any(pairs):
                break
        first, noun = self._favourite(g.HELPERS, name).split("|")
        cast = Cast(
            name=name,
            girl=girl,
            animal=animal,
            place=place,
            object=thing,
            helper=f"{first} {noun}",
            later_helper=f"the {noun}",
            place_look=self._look(g.PLACE_LOOKS),
            object_look=self._look(g.OBJECT_LOOKS),
        )
        return self._befriend(cast) if friend else cast

    def _befriend(self, cast: Cast) -> Cast:
        other = self.rng.choice([n for n in g.GIRLS + g.BOYS if n != cast.name])
        animal = self.rng.choice([a for a in g.ANIMALS if a != cast.animal])
        return replace(
            cast,
            helper=f"{other} the {animal}",
            later_helper=other,
            friend=other,
            friend_animal=animal,
        )

    def _word(self, usual: Iterable[str], more: Iterable[str]) -> str:
        return self.rng.choice(list(more if self.rng.random() < self.odd else usual))

    def _look(self, looks: list[str]) -> str:
        """Return an adjective and a space, or mostly nothing."""
        return self.rng.choice(looks) + " " if self.rng.random() < 1.5 * self.odd else ""

    def again(self, hero: Cast) -> Cast:
        """Return a cast with the same hero and another place and object."""
        while True:
            cast = self.cast()
            pairs = held_out(hero.name, cast.object), held_out(hero.animal, cast.place)
            if not any(pairs):
                return replace(cast, name=hero.name, girl=hero.girl, animal=hero.animal)

    def _favourite(self, options: Sequence[Option], word: str) -> Option:
        """Return one of the options. Two times in five it is the one that goes with the word.

        So stories with different words differ even under greedy decoding.
        """
        if self.rng.random() < 0.4:
            return options[zlib.crc32(word.encode()) % len(options)]
        return self.rng.choice(options)

    def _name(self, girl: bool) -> str:
        odd = self.rng.random() < self.odd
        if odd and self.rng.random() < 0.5:
            return "".join(self.rng.choices(g.SYLLABLES, k=self.rng.choice((2, 2, 3)))).capitalize()
        if odd:
            return self.rng.choice(g.MORE_GIRLS if girl else g.MORE_BOYS)
        return self.rng.choice(g.GIRLS if girl else g.BOYS)

    # -- sentences --------------------------------------------------------------------------

    def fill(self, template: str, cast: Cast | None = None) -> str:
        """Return the template with its choices made and its slots filled."""
        text = template
        while "{" in text:
            text = _CHOICE.sub(lambda m: self.rng.choice(m.group(1).split("|")), text)
        if cast is not None:
            slots = cast.slots()
            text = _SLOT.sub(lambda m: slots[m.group(1)], text)
        return _SENTENCE_START.sub(lambda m: m.group(1) + m.group(2).upper(), text)

    def _beat(self, beat: str | tuple[str, ...], cast: Cast) -> tuple[tuple[str, ...], ...]:
        """Return the lists of templates for a beat of a plot. Each gives one sentence."""
        if isinstance(beat, tuple):
            return (beat,)
        if self.rng.random() < 0.3:
            return ()
        if beat == "?interlude":
            return self._favourite(g.INTERLUDES, cast.animal)
        lists = {
            "early place": g.PLACES.get(cast.place, ())[1:2],
            "early animal": g.ANIMALS.get(cast.animal, ())[:1],
            "early weather": g.WEATHER[:3],
            "?place": g.PLACES.get(cast.place, ())[2:],
            "?animal": g.ANIMALS.get(cast.animal, ())[1:],
            "?object": g.OBJECTS.get(cast.object, ()),
            "?weather": g.WEATHER[3:],
            "?mood": g.MOOD,
            "?worry": g.WORRY,
            "?aside": g.ASIDES,
        }
        return (lists[beat],) if lists[beat] else ()

    def story(self, cast: Cast) -> str:
        """Return one story about the cast."""
        plot = g.PLOTS[self._favourite(list(g.PLOTS), cast.object)]
        sentences = [self.fill(self._favourite(g.OPENINGS, cast.name), cast)]
        # One sentence of a kind that never comes later, so that no sentence can come twice.
        early = self.rng.choice(("early place", "early animal", "early weather"))
        for beat in (early, *plot):
            for templates in self._beat(beat, cast):
                sentences.append(self.fill(self.rng.choice(templates), cast))
        sentences.append(self.fill(self._favourite(g.ENDINGS, cast.place), cast))
        if self.rng.random() < 0.25:
            sentences.append(self.fill(self.rng.choice(g.CODAS)))
        return " ".join(sentences)

    def request(self, cast: Cast) -> str:
        """Return a user's request for a story about the cast."""
        options = g.FRIEND_REQUESTS if cast.friend else g.STORY_REQUESTS
        return self._ask(self.rng.choice(options), cast)

    # -- documents --------------------------------------------------------------------------

    def story_pair(self) -> tuple[str, str, Cast]:
        """Return a request, its story and the cast."""
        kind = self.rng.random()
        cast = self.cast(friend=kind < 0.2)
        request = self.request(cast)
        if kind > 0.92:
            request = self._ask(self.rng.choice(g.PARTIAL_REQUESTS), cast)
        if self.rng.random() < 0.05:
            request = request.rstrip(".!?")
        return request, self.story(cast), cast

    def fact_pairs(self) -> list[tuple[str, str]]:
        """Return a message with one to three facts and a question, and the answer.

        More pairs may follow.
        """
        casts = self._different_casts(self.rng.choice((1, 2, 2, 3)))
        facts = " ".join(self.fill(self.rng.choice(g.FACTS), cast) for cast in casts)
        pairs = []
        for turn in range(self.rng.choice((1, 1, 2, 3))):
            options = g.QUESTIONS[self.rng.choice(list(g.QUESTIONS))]
            question, answer = self._answered(self.rng.choice(options), self.rng.choice(casts))
            pairs.append((f"{facts} {question}" if turn == 0 else question, answer))
        return pairs

    def _different_casts(self, count: int) -> list[Cast]:
        casts: list[Cast] = []
        while len(casts) < count:
            new = self.cast()
            words = {new.name, new.animal, new.place, new.object}
            if all(not words & {c.name, c.animal, c.place, c.object} for c in casts):
                casts.append(new)
        return casts

    def _ask(self, template: str, cast: Cast) -> str:
        """Return a user's message. It names the place with its adjective, if it has one."""
        return self.fill(template.replace("the <place>", "the <look><place>"), cast)

    def _answered(self, pair: tuple[str, str], cast: Cast) -> tuple[str, str]:
        return self.fill(pair[0], cast), self.fill(pair[1], cast)

    def story_questions(self, cast: Cast, count: int) -> list[tuple[str, str]]:
        """Return questions about a story just told, and the answers."""
        chosen = self.rng.sample(g.STORY_QUESTIONS, count)
        return [self._answered(pair, cast) for pair in chosen]

    def small_talk(self) -> tuple[str, str]:
        """Return a greeting or a question that is not about a story."""
        question, answer = self.rng.choice(g.SMALL_TALK)
        question = self.fill(question)
        return (question.lower() if self.rng.random() < 0.1 else question), self.fill(answer)

    def system(self) -> str:
        """Return a system message of one to sixteen sentences, or nothing."""
        if self.rng.random() < 0.75:
            return ""
        count = self.rng.choice((1, 1, 1, 2, 2, 3, 5, 8, 16))
        return " ".join(self.fill(s) for s in self.rng.sample(g.SYSTEM_SENTENCES, count))

    def chat(self, pairs: list[tuple[str, str]], *, system: bool = True) -> list[Segment]:
        """Return the chat template's text for some turns, perhaps with a system message."""
        message = self.system() if system else ""
        head = BOS + (SYSTEM + message if message else "")
        document = []
        for question, answer in pairs:
            document.append((f"{head}{USER}{question}{ASSISTANT}", False))
            document.append((answer + EOS, True))
            head = ""
        return document

    def raw(self, prompt: str, answer: str) -> list[Segment]:
        """Return plain text: the prompt, a line break, the answer."""
        return [(BOS + prompt, False), ("\n" + answer + EOS, True)]

    def long_chat(self, turns: int) -> list[Segment]:
        """Return several stories, questions about each and small talk in one conversation."""
        pairs: list[tuple[str, str]] = []
        while len(pairs) < turns:
            kind = self.rng.random()
            if kind < 0.15:
                pairs.append(self.small_talk())
            elif kind < 0.35:
                pairs += self.fact_pairs()
            else:
                request, story, cast = self.story_pair()
                pairs.append((request, story))
                pairs += self.story_questions(cast, self.rng.choice((0, 1, 2, 3)))
                if self.rng.random() < 0.15:
                    another = self.again(cast)
                    request = self._ask(self.rng.choice(g.ANOTHER), another)
                    pairs.append((request, self.story(another)))
        return self.chat(pairs)

    def document(self, progress: float = 1.0) -> list[Segment]:
        """Return one training document. With `progress` below 0.15, more are questions."""
        kind = self.rng.random()
        if progress < 0.15 and self.rng.random() < 0.5:
            return self.chat(self.fact_pairs())
        if kind < 0.26:
            request, story, _ = self.story_pair()
            return self.raw(request, story)
        if kind < 0.58:
            request, story, _ = self.story_pair()
            return self.chat([(request, story)])
        if kind < 0.68:
            request, story, cast = self.story_pair()
            questions = self.story_questions(cast, self.rng.choice((1, 2, 3)))
            return self.chat([(request, story), *questions])
        if kind < 0.82:
            return self.chat(self.fact_pairs())
        if kind < 0.85:
            return self.raw(*self.fact_pairs()[0])
        if kind < 0.90:
            return self.chat([self.small_talk()])
        if kind < 0.93:
            return [(BOS, False), (self.story(self.cast()) + EOS, True)]
        return self.long_chat(self.rng.choice((3, 5, 8) if progress > 0.15 else (2, 3)))


# -- held-out prompts and lists ---------------------------------------------------------------


def heldout_prompts(count: int, seed: int) -> Iterator[dict[str, object]]:
    """Return prompts on unseen pairs, each with its words, as the evaluation reads them.

    Three in four are about one hero, and one in four has a friend. Every other one is a chat.
    """
    writer = Writer(f"heldout-{seed}", unseen=True)
    for index in range(count):
        cast = writer.cast(friend=index % 4 == 3)
        yield {
            "prompt": writer.request(cast),
            "chat": index % 2 == 1,
            "name": cast.name,
            "pronoun": "she" if cast.girl else "he",
            "animal": cast.animal,
            "place": cast.place,
            "object": cast.object,
            "friend": cast.friend,
            "friend_animal": cast.friend_animal,
            "reference": writer.story(cast),
        }


def slot_lists() -> dict[str, list[str]]:
    """Return the words that a prompt can have."""
    return {
        "names": sorted(g.GIRLS + g.BOYS + g.MORE_GIRLS + g.MORE_BOYS),
        "animals": sorted([*g.ANIMALS, *g.MORE_ANIMALS]),
        "places": sorted([*g.PLACES, *g.MORE_PLACES]),
        "objects": sorted([*g.OBJECTS, *g.MORE_OBJECTS]),
    }


def usual_words() -> list[str]:
    """Return the words that held-out prompts have. Each is one token."""
    return [*g.GIRLS, *g.BOYS, *g.ANIMALS, *g.PLACES, *g.OBJECTS]


def word_list(seed: int, documents: int = 20_000) -> list[str]:
    """Return every word of a sample of stories in lower case, except those of the slot lists."""
    writer = Writer(f"words-{seed}")
    words: set[str] = set()
    for _ in range(documents):
        words.update(re.findall(r"[a-z]+(?:'[a-z]+)?", writer.story(writer.cast()).lower()))
    return sorted(words - {w.lower() for slots in slot_lists().values() for w in slots})


def check_grammar() -> None:
    """Raise if a template uses a word of the slot lists, which would confuse the model."""
    lists = slot_lists()
    slots = {word for words in lists.values() for word in words}
    slots = {word.lower() for word in slots}
    lists_in_code = ("GIRLS", "BOYS", "MORE_ANIMALS", "MORE_OBJECTS", "__doc__", "__builtins__")
    templates = {key: value for key, value in vars(g).items() if key not in lists_in_code}
    for template in _templates(templates):
        for word in re.findall(r"[A-Za-z]+", _SLOT.sub("", template)):
            if word.lower() in slots:
                raise ValueError(f"the template {template!r} uses the slot word {word!r}")


def _templates(value: object) -> Iterator[str]:
    """Yield every template in a value of `tiny_grammar`: strings with a space in them."""
    if isinstance(value, str):
        if " " in value:
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _templates(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _templates(item)
