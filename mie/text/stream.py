"""The text of one completion as its tokens arrive: detokenizer and stop strings in one."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from mie.text.detokenizer import Detokenizer
from mie.text.stop import StopStrings
from mie.text.tokenizer import Tokenizer


class TextStream:
    """Token ids in, text out, until a stop string is complete.

        stream = TextStream(tokenizer, prompt_token_ids, stop=["\\n\\n"])
        text, stopped_by = stream.add([token_id])      # for every step
        text += stream.finish()[0]                     # when the tokens end by themselves

    A stop string is seen with the token that completes it, even where the detokenizer still holds
    that token's bytes back (Llama-2's newline is a byte token, whose text the next one settles).
    Only new text is searched, never the prompt's. The choices of one request are `fork` s of one
    stream: the prompt and the stop strings are then prepared once.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._detokenizer = Detokenizer(
            tokenizer,
            prompt_token_ids,
            skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
        )
        self._stop = StopStrings(stop, include_stop_str_in_output)
        self._searches = bool(stop)
        self._exempt = 0  # characters held back that came while unarmed

    def fork(self) -> TextStream:
        """Return a copy that goes its own way from here."""
        fork = copy.copy(self)
        fork._detokenizer, fork._stop = self._detokenizer.fork(), self._stop.fork()
        return fork

    def add(self, token_ids: Sequence[int], armed: bool = True) -> tuple[str, str | None]:
        """Return the text that ``token_ids`` add, and the stop string that ended it, or None.

        ``armed`` is false while ``min_tokens`` forbids to stop. A stop string that these tokens
        complete is then text like any other; one that they begin is found when it is complete.
        """
        text, found = self._search(self._detokenizer.add(token_ids), armed)
        if found is not None or not self._searches:
            return text, found
        pending = self._detokenizer.pending()
        if not armed:
            self._exempt = len(pending.partition("\ufffd")[0])
        elif "\ufffd" not in pending and self._stop.peek(pending, self._exempt) is not None:
            more, found = self._stop.add(pending, self._exempt)
            text += more
        return text, found

    def finish(self, armed: bool = True) -> tuple[str, str | None]:
        """Return the rest of the text once no token follows, and the stop string found in it, or
        None."""
        text, found = self._search(self._detokenizer.finish(), armed)
        return (text, found) if found else (text + self._stop.flush(), None)

    def _search(self, text: str, armed: bool) -> tuple[str, str | None]:
        exempt = min(self._exempt, len(text)) if armed else len(text)
        self._exempt -= min(self._exempt, len(text))
        return self._stop.add(text, exempt)
