"""Removes the opening that a template, not the answer, adds to a reply that arrives in pieces."""

from __future__ import annotations


class Opening:
    """The text that a model writes before an answer's words: withheld until complete, then removed."""

    def __init__(self, text: str) -> None:
        self._text, self._begun = text, ""

    def cut(self, piece: str, *, is_last: bool = False) -> str:
        """Return the part of the next piece that can be shown, including text withheld earlier."""
        if not self._text:
            return piece
        whole = self._begun + piece
        # The reply may still turn out to begin differently, so nothing is shown until the opening is complete.
        if not is_last and len(whole) < len(self._text) and self._text.startswith(whole):
            self._begun = whole
            return ""
        shown = whole.removeprefix(self._text)
        self._text = self._begun = ""
        return shown
