"""Text that grows, without the space at its borders with tags."""

from __future__ import annotations


class BorderedText:
    """Gathers a text in pieces. Space before a tag and after it belongs to the format."""

    def __init__(self) -> None:
        self.text = ""
        self._space = ""
        self._is_at_border = False

    def add(self, text: str) -> None:
        """Add a piece. Space at its end waits for what follows."""
        kept = text.rstrip()
        if kept:
            if self._is_at_border:  # text on both sides of a part stays apart
                self.text += ("\n" if self.text else "") + kept.lstrip()
            else:
                self.text += self._space + kept
            self._is_at_border = False
            self._space = text[len(kept) :]
        else:
            self._space += text

    def border(self) -> None:
        """Mark the place of a tag."""
        self._space = ""
        self._is_at_border = True

    def end(self) -> None:
        """Add the space that waits, because no tag follows it."""
        if not self._is_at_border:
            self.text += self._space
        self._space = ""
