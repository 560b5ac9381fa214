"""Make up words for the training text, and know the words that it must never have."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from string import ascii_lowercase

DATA = Path(__file__).parents[2] / "tests" / "data"
UNSEEN: Mapping[str, Sequence[str]] = json.loads(
    (DATA / "tiny_unseen.json").read_text(encoding="utf-8")
)
"""The words of the evaluation, by kind."""


class MadeUp:
    """Words that are on no list: spelled by syllables, of random letters, or of other alphabets."""

    def __init__(
        self, rng: Random, parts: Mapping[str, Sequence[str]], common: Sequence[str]
    ) -> None:
        """Use the syllables and letters of `parts`, and sometimes two common words."""
        self.rng, self.parts, self.common = rng, parts, common
        self.unseen = {word.lower() for words in UNSEEN.values() for word in words}

    def word(self, *, name: bool = False) -> str:
        """Return a word that is on no list, and hardly ever the same twice."""
        while True:
            kind = self.rng.random()
            if kind < 0.15:
                word = "".join(self.rng.choices(self.parts["syllables"], k=self.rng.randint(2, 4)))
            elif kind < 0.65:
                word = self._spelled()
            elif kind < 0.78 and not name:
                word = "".join(self.rng.sample(self.common, 2))
            elif kind < 0.88:
                word = "".join(self.rng.choices(ascii_lowercase, k=self.rng.randint(2, 7)))
            else:
                word = self._foreign()
            if self.rng.random() < (0.1 if name else 0.2):
                first = word if self.rng.random() < 0.5 else self.rng.choice(self.common)
                word = first + self.rng.choice("-' " if name else "-   ") + self._spelled()
            if name:
                word = " ".join(part[:1].upper() + part[1:] for part in word.split(" "))
                if self.rng.random() < 0.5:
                    word = "-".join(part[:1].upper() + part[1:] for part in word.split("-"))
            if word.lower() not in self.unseen:
                return word

    def _spelled(self) -> str:
        """Return one to four syllables of a beginning, a vowel and perhaps an end."""
        word = self.rng.choice(("", "", self.rng.choice(self.parts["vowels"])))
        for _ in range(self.rng.choice((1, 2, 2, 3) if word else (1, 2, 2, 2, 3, 4))):
            word += self.rng.choice(self.parts["onsets"]) + self.rng.choice(self.parts["vowels"])
            word += self.rng.choice(self.parts["codas"]) if self.rng.random() < 0.35 else ""
        return word + (self.rng.choice(self.parts["suffixes"]) if self.rng.random() < 0.3 else "")

    def _foreign(self) -> str:
        """Return letters of another alphabet, or a spelled word with some accents."""
        accents, *alphabets = self.parts["letters"]
        if self.rng.random() < 0.4:
            return "".join(self.rng.choices(self.rng.choice(alphabets), k=self.rng.randint(2, 6)))
        return "".join(
            self.rng.choice(accents) if self.rng.random() < 0.25 else letter
            for letter in self._spelled()
        )
