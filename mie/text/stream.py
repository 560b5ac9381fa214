"""Turn the tokens of a completion into text: a detokenizer and stop strings in one."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from mie.text.detokenizer import Detokenizer
from mie.text.stop import StopStrings
from mie.text.tokenizer import Tokenizer


class TextStream:
    """Converts token ids to text until a stop string is complete.

        stream = TextStream(tokenizer, prompt_token_ids, stop=["\\n\\n"])
        text, stopped_by = stream.add([token_id])      # in every step
        text += stream.finish()[0]                     # if no stop string ended the text

    A stop string is found with the token that completes it, even if the detokenizer still holds
    back that token's bytes. (Llama-2's newline is a byte token, whose text is settled by the next
    token.) Only new text is searched, never the prompt. The choices of one request are `fork` s of
    one stream, so that the prompt and the stop strings are prepared once.
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
        kept_tokens: Sequence[str] = (),
    ) -> None:
        """``kept_tokens`` are special tokens that are never left out."""
        self._detokenizer = Detokenizer(
            tokenizer,
            prompt_token_ids,
            skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
            kept_tokens=kept_tokens,
        )
        self._stop = StopStrings(stop, include_stop_str_in_output)
        self._searches = bool(stop)
        self._exempt = 0  # held-back characters that arrived while unarmed

    def fork(self) -> TextStream:
        """Return an independent copy."""
        fork = copy.copy(self)
        fork._detokenizer, fork._stop = self._detokenizer.fork(), self._stop.fork()
        return fork

    def add(self, token_ids: Sequence[int], armed: bool = True) -> tuple[str, str | None]:
        """Return the text that ``token_ids`` add, and the stop string that ended it or None.

        ``armed`` is false while ``min_tokens`` forbids stopping. A stop string that these tokens
        complete is then ordinary text. One that they begin counts when it is complete.
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
        """Return the rest of the text after the last token, and the stop string in it or None."""
        text, found = self._search(self._detokenizer.finish(), armed)
        return (text, found) if found else (text + self._stop.flush(), None)

    def _search(self, text: str, armed: bool) -> tuple[str, str | None]:
        exempt = min(self._exempt, len(text)) if armed else len(text)
        self._exempt -= min(self._exempt, len(text))
        return self._stop.add(text, exempt)
