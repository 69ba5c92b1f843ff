"""Splits a sample's text into the pieces that each token adds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from hone.observe.run_folder import RunFolder

__all__ = ["Splitter"]

Decode = Callable[[Sequence[int]], str]


class Splitter:
    """Splits token ids into pieces of text, with the tokenizer of a run or another `decode`."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._alone: dict[int, str] = {}

    @classmethod
    def of_run(cls, run: RunFolder) -> Splitter | None:
        """Splitter with the tokenizer of the run's folder or of the configured model folder. None
        without one."""
        folders = [run.path / "model", *sorted(run.path.glob("checkpoints/step_*"), reverse=True)]
        named = [run.setting("model.tokenizer"), run.setting("model.path")]
        folders += [Path(name) for name in named if name]
        files = (folder / "tokenizer.json" for folder in folders)
        found = next((file for file in files if file.is_file()), None)
        if found is None:
            return None
        tokenizer = Tokenizer.from_file(str(found))
        return cls(lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False))

    def __call__(self, token_ids: Sequence[int]) -> list[str]:
        """One piece per token; joined they are the decoded text."""
        alone = self._alone
        for token_id in set(token_ids).difference(alone):
            alone[token_id] = self._decode([token_id])
        pieces = [alone[token_id] for token_id in token_ids]
        # The joined pieces differ if a character spans several tokens or a leading space is
        # dropped.
        return pieces if "".join(pieces) == self._decode(token_ids) else self._one_by_one(token_ids)

    def _one_by_one(self, token_ids: Sequence[int]) -> list[str]:
        """Tokens that end inside a character add nothing; the token that completes it adds all of
        it. Decoding starts one token back, because some tokenizers drop a leading space."""
        pieces: list[str] = []
        context: list[int] = []
        pending: list[int] = []
        for token_id in token_ids:
            pending.append(token_id)
            text = self._decode([*context, *pending])[len(self._decode(context)) :]
            if text.endswith("�") and len(pending) < 4:
                pieces.append("")
                continue
            pieces.append(text)
            context, pending = pending if "�" not in text else [], []
        return pieces
