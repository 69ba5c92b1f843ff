"""Stop strings on text that is decoded token by token."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

__all__ = ["StopStringWatcher"]

_INCOMPLETE = "\ufffd"


class StopStringWatcher:
    """Says when the decoded completion contains one of the stop strings.

    Decodes a short window instead of the whole text: a token may change how its neighbours are
    rendered (a leading space, the bytes of one character), so new text is what the window gains by
    the new tokens, and bytes that are no complete character yet stay in the window.
    Special tokens are decoded too, so `<|im_end|>` is a valid stop string.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._tail_chars = max(map(len, stop)) - 1
        self.has_matched = False
        """A stop string is in the text, since the token that was pushed last."""
        self._tail = ""  # the newest complete text that a match may begin in
        self._window: list[int] = []  # tokens whose text is `_known`, then those not complete
        self._num_known = 0
        self._known = ""

    def push(self, token_id: int) -> bool:
        """Add a sampled token; True when a stop string is in the text. Where the tokenizer raises,
        the token can be pushed again."""
        self.has_matched = self._matches(token_id)
        return self.has_matched

    def _matches(self, token_id: int) -> bool:
        window = [*self._window, token_id]
        new_text = self._decode(window)[len(self._known) :]
        # A match may be complete although the bytes after it are not.
        visible = self._tail + new_text.rstrip(_INCOMPLETE)
        if any(stop in visible for stop in self._stop):
            self._window = window
            return True
        if new_text and not new_text.endswith(_INCOMPLETE):
            window = window[self._num_known :]
            self._known = self._decode(window)  # which may raise
            self._tail = visible[-self._tail_chars :] if self._tail_chars else ""
            self._num_known = len(window)
        self._window = window
        return False

    def _decode(self, token_ids: list[int]) -> str:
        text = self._tokenizer.decode(
            token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text
