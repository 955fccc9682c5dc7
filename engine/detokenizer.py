"""Text of a growing list of token ids, piece by piece.

Each step decodes only the ids since the last piece, after those of that piece as context: what a
token decodes to may depend on the one before (a leading space, a character's first bytes).
"""

from collections.abc import Callable

REPLACEMENT = "\ufffd"


class IncrementalDetokenizer:
    """The pieces add up to `decode` of all ids.

    A piece never ends within a character: ids whose text ends in U+FFFD are held back until more
    come, or until `flush`. The one exception to the sum: a tokenizer with byte fallback redraws
    a run of byte tokens that turns out to be invalid, after its valid start was handed out.
    """

    def __init__(self, decode: Callable[[list[int]], str], has_text: Callable[[int], bool]):
        self._decode = decode
        self._has_text = has_text
        self._window: list[int] = []  # ids of the last piece, then those held back
        self._num_done = 0  # how many of the window's ids are of the last piece
        self._done_text = ""  # their text

    def append(self, token_id: int) -> str:
        """The text that `token_id` completes: often one word, empty within a character."""
        if not self._has_text(token_id):
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT):
            return ""
        return self._emit(text)

    def flush(self) -> str:
        """Whatever was held back, incomplete characters as U+FFFD."""
        return self._emit(self._decode(self._window)) if self._window else ""

    def _emit(self, text: str) -> str:
        piece = text[len(self._done_text) :]
        if piece:  # else the ids stay in the window, as they may matter to the next
            self._window = self._window[self._num_done :]
            self._num_done = len(self._window)
            self._done_text = self._decode(self._window)
        return piece
