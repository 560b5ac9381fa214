"""Write endless training documents for the bundled model from the templates of `stories.toml`.

A document is a list of `(text, learn)` segments. The model reads all of them and is trained to
write those with `learn` true. The special tokens are in the text by name.

A (name, object) or (animal, place) pair whose CRC-32 is a multiple of eight never occurs in a
training document. In the casts of the held-out prompts, both pairs are of that kind.
"""

import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import TypeVar

from words import MadeUp

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

BOS, EOS = "<|bos|>", "<|eos|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (BOS, EOS, SYSTEM, USER, ASSISTANT)

Segment = tuple[str, bool]
Templates = tuple[str, ...]
Option = TypeVar("Option")

_CHOICE = re.compile(r"\{([^{}]*)\}")
_SLOT = re.compile(r"<([a-z_]+)>")
_SENTENCE_START = re.compile(r"(^\"?|[.!?] )([a-z])")
_PRONOUNS = {
    True: {"she": "she", "her": "her", "hers": "hers", "him": "her", "herself": "herself"},
    False: {"she": "he", "her": "his", "hers": "his", "him": "him", "herself": "himself"},
}


class Grammar:
    """The tables of `stories.toml`, with the phrases in place of their names."""

    def __init__(self, path: Path) -> None:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        phrases: dict[str, str] = tables["phrases"]

        def lines(text: str) -> Templates:
            for name, phrase in reversed(phrases.items()):
                text = text.replace(f"<{name}>", phrase)
            return tuple(text.splitlines())

        def beats(text: str) -> list[Templates]:
            return [lines(beat) for beat in text.split("\n\n")]

        self.words = {name: text.split() for name, text in tables["words"].items()}
        self.fitting: dict[str, dict[str, Templates]] = {
            name: {
                word: tuple(sentences.split(" / "))
                for word, sentences in (line.split(": ", 1) for line in text.splitlines())
            }
            for name, text in tables["fitting"].items()
        }
        self.lines = {name: lines(text) for name, text in tables["lines"].items()}
        self.common_words = sorted(
            {
                word
                for group in self.lines.values()
                for line in group
                for word in re.findall(r"\b[a-z]{4,8}\b", line)
            }
        )
        self.pairs = {
            name: [(line.split(" => ")[0], line.split(" => ")[1]) for line in lines(text)]
            for name, text in tables["pairs"].items()
        }
        self.plots = {name: beats(text) for name, text in tables["plots"].items()}
        self.interludes = [beats(text) for text in tables["interludes"].values()]

    def check(self) -> None:
        """Raise `ValueError` if a template uses a word of the slot lists.

        Such a word would confuse the model.
        """
        slots = {word.lower() for words in slot_lists().values() for word in words}
        templates = [
            *(template for group in self.lines.values() for template in group),
            *(template for group in self.pairs.values() for pair in group for template in pair),
            *(
                line
                for table in self.fitting.values()
                for lines in table.values()
                for line in lines
            ),
            *(
                line
                for plot in [*self.plots.values(), *self.interludes]
                for beat in plot
                for line in beat
            ),
        ]
        for template in templates:
            if " " in template:  # else it is a preposition or the name of a list
                for word in re.findall(r"[A-Za-z]+", _SLOT.sub("", template)):
                    if word.lower() in slots:
                        raise ValueError(f"the template {template!r} uses the slot word {word!r}")


G = Grammar(Path(__file__).with_name("stories.toml"))

ASKS = [name for name in G.pairs if name.startswith("ask_")]


def with_article(noun: str) -> str:
    """Return `noun` with "a" or "an" before it."""
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def preposition(place: str) -> str:
    """Return the preposition of a place. A made-up place has one by chance, but always the same."""
    listed = (G.fitting["places"] | G.fitting["more_places"]).get(place)
    return listed[0] if listed else ("at", "at", "in", "in", "by")[zlib.crc32(place.encode()) % 5]


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


@dataclass(frozen=True, kw_only=True)
class Told:
    """A story with its cast and its plot."""

    text: str
    cast: Cast
    plot: str

    def renamed(self, name: str) -> "Told":
        """Return the same story with another name for the hero."""
        whole_word = rf"(?<!\w){re.escape(self.cast.name)}(?!\w)"
        text = re.sub(whole_word, lambda _: name, self.text)
        return replace(self, text=text, cast=replace(self.cast, name=name))


def held_out(first: str, second: str) -> bool:
    """Return whether training must never see these two words in one cast."""
    return zlib.crc32(f"{first}|{second}".encode()) % 8 == 0


class Writer:
    """Writes documents with its own random generator."""

    def __init__(self, seed: int | str, *, unseen: bool = False, odd: float = 0.0) -> None:
        """Create a writer.

        With `unseen`, casts have only held-out pairs. `odd` is the mean share of words that are
        not on the usual lists. Each document has its own share, from zero to twice the mean.
        """
        self.rng = Random(seed)
        self.unseen = unseen
        self.mean_odd = self.odd = odd
        self.made_up = MadeUp(self.rng, G.words, G.common_words)
        self.slot_words: set[str] = set()

    # -- words ------------------------------------------------------------------------------

    def cast(self, *, friend: bool = False) -> Cast:
        """Return random words for a story, in keeping with the held-out rule."""
        while True:
            girl = self.rng.random() < 0.5
            name = self._name(girl)
            animal = self._word("animals")
            place = self._word("places")
            thing = self._word("objects")
            pairs = held_out(name, thing), held_out(animal, place)
            if all(pairs) if self.unseen else not any(pairs):
                break
        first, noun = self._favourite(G.lines["helpers"], name).split("|")
        cast = Cast(
            name=name,
            girl=girl,
            animal=animal,
            place=place,
            object=thing,
            helper=f"{first} {noun}",
            later_helper=f"the {noun}",
            place_look=self._look("place_looks"),
            object_look=self._look("object_looks"),
        )
        self.slot_words |= {cast.name, cast.animal, cast.place, cast.object}
        return self._befriend(cast) if friend else cast

    def _befriend(self, cast: Cast) -> Cast:
        if self.odd and self.rng.random() < self.odd:
            other, animal = self.made_up.word(name=True), self.made_up.word()
        else:
            names = G.words["girls"] + G.words["boys"]
            other = self.rng.choice([n for n in names if n != cast.name])
            animal = self.rng.choice([a for a in G.fitting["animals"] if a != cast.animal])
        self.slot_words |= {other, animal}
        return replace(
            cast,
            helper=f"{other} the {animal}",
            later_helper=other,
            friend=other,
            friend_animal=animal,
        )

    def _word(self, kind: str) -> str:
        if self.rng.random() >= self.odd:
            return self.rng.choice(list(G.fitting[kind]))
        return self.rng.choice(_more(kind)) if self.rng.random() < 0.4 else self.made_up.word()

    def _look(self, looks: str) -> str:
        """Return an adjective and a space, or mostly nothing."""
        return (
            self.rng.choice(G.words[looks]) + " "
            if self.rng.random() < min(0.15, 1.5 * self.odd)
            else ""
        )

    def again(self, hero: Cast) -> Cast:
        """Return a cast with the same hero and another place and object."""
        while True:
            cast = self.cast()
            pairs = held_out(hero.name, cast.object), held_out(hero.animal, cast.place)
            if not any(pairs):
                self.slot_words |= {hero.name, hero.animal}
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
        if odd and self.rng.random() < 0.6:
            return self.made_up.word(name=True)
        if odd:
            return self.rng.choice(G.words["more_girls" if girl else "more_boys"])
        return self.rng.choice(G.words["girls" if girl else "boys"])

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

    def _beat(self, beat: Templates, cast: Cast) -> list[Templates]:
        """Return the lists of templates for a beat of a plot. Each gives one sentence."""
        if not beat[0].startswith("?"):
            return [beat]
        if self.rng.random() < 0.3:
            return []
        if beat[0] == "?interlude":
            return self._favourite(G.interludes, cast.animal)
        place = G.fitting["places"].get(cast.place, ())
        animal = G.fitting["animals"].get(cast.animal, ())
        templates = {
            "?early place": place[1:2],
            "?early animal": animal[:1],
            "?early weather": G.lines["weather"][:3],
            "?place": place[2:],
            "?animal": animal[1:],
            "?object": G.fitting["objects"].get(cast.object, ()),
            "?weather": G.lines["weather"][3:],
            "?mood": G.lines["mood"],
            "?worry": G.lines["worry"],
            "?aside": G.lines["asides"],
        }[beat[0]]
        return [templates] if templates else []

    def plot(self, cast: Cast) -> str:
        """Return the name of a plot for the cast."""
        return self._favourite(list(G.plots), cast.object)

    def story(self, cast: Cast, plot: str = "") -> str:
        """Return one story about the cast, perhaps with a given plot."""
        beats = G.plots[plot or self.plot(cast)]
        sentences = [self.fill(self._favourite(G.lines["openings"], cast.name), cast)]
        # One sentence of a kind that never comes later, so that no sentence can come twice.
        early = self.rng.choice(("?early place", "?early animal", "?early weather"))
        for beat in ((early,), *beats):
            for templates in self._beat(beat, cast):
                sentences.append(self.fill(self.rng.choice(templates), cast))
        sentences.append(self.fill(self._favourite(G.lines["endings"], cast.place), cast))
        if self.rng.random() < 0.25:
            sentences.append(self.fill(self.rng.choice(G.lines["codas"])))
        return " ".join(sentences)

    def request(self, cast: Cast) -> str:
        """Return a user's request for a story about the cast."""
        options = G.lines["friend_requests"] if cast.friend else G.lines["story_requests"]
        return self._ask(self.rng.choice(options), cast)

    # -- documents --------------------------------------------------------------------------

    def story_pair(self) -> tuple[str, "Told"]:
        """Return a request and its story."""
        kind = self.rng.random()
        cast = self.cast(friend=kind < 0.2)
        request = self.request(cast)
        if kind > 0.92:
            template = self.rng.choice(G.lines["partial_requests"])
            cast = self._usual_but(template, cast)
            request = self._ask(template, cast)
        if self.rng.random() < 0.05:
            request = request.rstrip(".!?")
        return request, self._tell(cast, self.plot(cast))

    def _usual_but(self, template: str, cast: Cast) -> Cast:
        """Return a usual cast that shares only the words of the template with `cast`.

        A story must invent the words that the request leaves out, and shall not invent odd ones.
        """
        named = [kind for kind in ("name", "animal", "place", "object") if f"{kind}>" in template]
        kept = {kind: getattr(cast, kind) for kind in named}
        odd, self.odd = self.odd, 0.0
        while True:
            usual = self.cast()
            mixed = replace(usual, **kept, girl=cast.girl if "name" in kept else usual.girl)
            if not held_out(mixed.name, mixed.object) and not held_out(mixed.animal, mixed.place):
                self.odd = odd
                return mixed

    def _tell(self, cast: Cast, plot: str) -> "Told":
        return Told(text=self.story(cast, plot), cast=cast, plot=plot)

    def short_story(self, cast: Cast, plot: str) -> str:
        """Return the plot in two or three sentences."""
        return self.fill(self.rng.choice(G.lines[f"short_{plot}"]), cast)

    def follow_ups(self, told: "Told", count: int) -> list[tuple[str, str]]:
        """Return requests about the story just told, and the answers."""
        pairs: list[tuple[str, str]] = []
        for _ in range(count):
            kind = self.rng.random()
            if kind < 0.14 and len(told.text) > 300:
                answer = self.short_story(told.cast, told.plot)
                pairs.append(self._follow("shorter_requests", told, answer))
            elif kind < 0.36:
                told = self._tell(told.cast, _next_plot(told.plot))
                pairs.append(self._follow("same_again", told, told.text))
            elif kind < 0.66:
                # The new name may be a girl's or a boy's, since only the name shall change.
                new = told.renamed(self._name(self.rng.random() < 0.5))
                self.slot_words.add(new.cast.name)
                template = self.rng.choice(G.lines["rename_requests"])
                request = self._ask(template.replace("<new>", new.cast.name), told.cast)
                told = new
                pairs.append((self._casually(request), told.text))
            elif kind < 0.80:
                beats = [G.lines[f"next_{part}"] for part in ("first", "second", "third")]
                chosen = beats if self.rng.random() < 0.6 else beats[:2]
                answer = " ".join(self.fill(self.rng.choice(b), told.cast) for b in chosen)
                pairs.append(self._follow("next_requests", told, answer))
            elif kind < 0.90:
                pairs += self.story_questions(told.cast, 1)
            else:
                pairs.append(self.small_talk())
        return pairs

    def _follow(self, requests: str, told: "Told", answer: str) -> tuple[str, str]:
        request = self._ask(self.rng.choice(G.lines[requests]), told.cast)
        return self._casually(request), answer

    def _casually(self, request: str) -> str:
        """Return a request that sometimes begins small or has no full stop."""
        if self.rng.random() < 0.15:
            request = request[:1].lower() + request[1:]
        return request.rstrip(".!?") if self.rng.random() < 0.15 else request

    def fact_pairs(self) -> list[tuple[str, str]]:
        """Return a message with one to three facts and a question, and the answer.

        More pairs may follow.
        """
        casts = self._different_casts(self.rng.choice((1, 2, 2, 3)))
        facts = " ".join(self.fill(self.rng.choice(G.lines["facts"]), cast) for cast in casts)
        pairs = []
        for turn in range(self.rng.choice((1, 1, 2, 3))):
            options = G.pairs[self.rng.choice(ASKS)]
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
        chosen = self.rng.sample(G.pairs["story_questions"], count)
        return [self._answered(pair, cast) for pair in chosen]

    def small_talk(self) -> tuple[str, str]:
        """Return a greeting or a question that is not about a story."""
        question, answer = self.rng.choice(G.pairs["small_talk"])
        question = self.fill(question)
        return (question.lower() if self.rng.random() < 0.1 else question), self.fill(answer)

    def system(self) -> str:
        """Return a system message of one to sixteen sentences, or nothing."""
        if self.rng.random() < 0.75:
            return ""
        count = self.rng.choice((1, 1, 1, 2, 2, 3, 5, 8, 16))
        return " ".join(self.fill(s) for s in self.rng.sample(G.lines["system_sentences"], count))

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
                request, told = self.story_pair()
                pairs.append((request, told.text))
                pairs += self.story_questions(told.cast, self.rng.choice((0, 1, 2, 3)))
                if self.rng.random() < 0.15:
                    another = self.again(told.cast)
                    request = self._ask(self.rng.choice(G.lines["another"]), another)
                    pairs.append((request, self.story(another)))
        return self.chat(pairs)

    def very_short(self) -> list[Segment]:
        """Return a request for a very short story, and the story."""
        cast = self.cast()
        request = self._ask(self.rng.choice(G.lines["very_short_requests"]), cast)
        pair = self._casually(request), self.short_story(cast, self.plot(cast))
        return self.raw(*pair) if self.rng.random() < 0.3 else self.chat([pair])

    def asked(self) -> list[Segment]:
        """Return a chat of a story or a very short one and requests about it."""
        request, told = self.story_pair()
        if not told.cast.friend and self.rng.random() < 0.5:
            request = self._ask(self.rng.choice(G.lines["very_short_requests"]), told.cast)
            told = replace(told, text=self.short_story(told.cast, told.plot))
        more = self.follow_ups(told, self.rng.choice((1, 1, 2)))
        return self.chat([(request, told.text), *more])

    def repetition(self) -> list[Segment]:
        """Return a request to repeat some made-up words, and the words.

        Nothing teaches faster to copy a word of several tokens.
        """
        count = self.rng.randint(2, 9)
        words = [self.made_up.word(name=self.rng.random() < 0.4) for _ in range(count)]
        self.slot_words |= set(words)
        text = self.rng.choice((", ", ", ", " ", " and ")).join(words)
        request = self.fill(self.rng.choice(G.lines["repeat_requests"])).replace("<text>", text)
        return self.chat([(request, f"{text}.")], system=False)

    def document(self, progress: float = 1.0) -> list[Segment]:
        """Return one training document.

        The first ones are mostly short, and the last ones have more requests.
        """
        self.slot_words.clear()
        self.odd = 2 * self.mean_odd * self.rng.random()
        if self.rng.random() < (0.4 if progress < 0.3 else 0.03):
            return self.repetition()
        if progress < 0.2 and self.rng.random() < 0.5:
            return self.very_short() if self.rng.random() < 0.4 else self.chat(self.fact_pairs())
        if progress > 0.5 and self.rng.random() < 0.4:
            return self.asked()
        kind = self.rng.random()
        if kind < 0.18:
            request, told = self.story_pair()
            return self.raw(request, told.text)
        if kind < 0.38:
            request, told = self.story_pair()
            return self.chat([(request, told.text)])
        if kind < 0.47:
            request, told = self.story_pair()
            questions = self.story_questions(told.cast, self.rng.choice((1, 2, 3)))
            return self.chat([(request, told.text), *questions])
        if kind < 0.65:
            return self.asked()
        if kind < 0.76:
            return self.chat(self.fact_pairs())
        if kind < 0.79:
            return self.raw(*self.fact_pairs()[0])
        if kind < 0.87:
            return self.very_short()
        if kind < 0.95:
            return self.chat([self.small_talk()])
        if kind < 0.97:
            self.odd = 0.0
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


def _next_plot(plot: str) -> str:
    """Return the plot of another story. It follows from the first one, so it can be learned."""
    plots = list(G.plots)
    return plots[(plots.index(plot) + 1) % len(plots)]


def _more(kind: str) -> list[str]:
    """Return the words of a kind that have no sentences of their own."""
    if kind == "places":
        return list(G.fitting["more_places"])
    return [*G.words[f"more_{kind}"], *(w.replace("-", " ") for w in G.words[f"pair_{kind}"])]


def slot_lists() -> dict[str, list[str]]:
    """Return the single words that a prompt can have. The checker does not know pairs."""
    names = ("girls", "boys", "more_girls", "more_boys")
    lists = {
        "names": [word for name in names for word in G.words[name]],
        **{k: [*G.fitting[k], *_more(k)] for k in ("animals", "places", "objects")},
    }
    return {kind: sorted(w for w in words if " " not in w) for kind, words in lists.items()}


def usual_words() -> list[str]:
    """Return the words that held-out prompts have. Each is one token."""
    kinds = ("animals", "places", "objects")
    return [*G.words["girls"], *G.words["boys"], *(w for kind in kinds for w in G.fitting[kind])]


def word_list(seed: int, documents: int = 20_000) -> list[str]:
    """Return every word of a sample of stories and of answers about them.

    Words are in lower case. Those of the slot lists are left out.
    """
    writer = Writer(f"words-{seed}")
    words: set[str] = set()
    for _ in range(documents):
        _, told = writer.story_pair()
        texts = [told.text, *(answer for _, answer in writer.follow_ups(told, 2))]
        words.update(re.findall(r"[a-z]+(?:'[a-z]+)?", " ".join(texts).lower()))
    return sorted(words - {w.lower() for slots in slot_lists().values() for w in slots})
