"""The text of one completion as its tokens arrive: detokenizer and stop strings in one."""

from __future__ import annotations

from collections.abc import Sequence

from mie.text.detokenizer import Detokenizer
from mie.text.stop import StopStrings
from mie.text.tokenizer import Tokenizer


class TextStream:
    """Token ids in, text out, until a stop string is complete.

        stream = TextStream(tokenizer, prompt_token_ids, stop=["\\n\\n"])
        text, stopped_by = stream.add([token_id])      # for every step
        text += stream.finish()                        # when the tokens end by themselves

    A stop string is seen with the token that completes it, even where the detokenizer still holds
    that token's bytes back (Llama-2's newline is a byte token, whose text the next one settles).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_token_ids, skip_special_tokens)
        self._stop = StopStrings(stop, include_stop_str_in_output)
        self._searches = bool(stop)

    def add(self, token_ids: Sequence[int], armed: bool = True) -> tuple[str, str | None]:
        """The text that ``token_ids`` add, and the stop string that ended it, or None.

        ``armed`` is false while ``min_tokens`` forbids to stop; see ``StopStrings.add``.
        """
        text, found = self._stop.add(self._detokenizer.add(token_ids), armed)
        if found is None and self._searches and armed:
            pending = self._detokenizer.pending()
            if "\ufffd" not in pending and self._stop.peek(pending) is not None:
                more, found = self._stop.add(pending)
                text += more
        return text, found

    def finish(self, armed: bool = True) -> tuple[str, str | None]:
        """The rest of the text once no token follows, and the stop string found in it, or None."""
        text, found = self._stop.add(self._detokenizer.finish(), armed)
        return (text, found) if found else (text + self._stop.flush(), None)
