"""Samples as the report shows them: token by token, shaded by log-probability."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from hone.observe.run_folder import RunFolder

__all__ = ["split_pieces", "transcripts"]

MAX_TOKENS = 1500
"""Tokens of a sample that are shown."""

Decode = Callable[[Sequence[int]], str]


def transcripts(run: RunFolder, *, num_steps: int = 5, per_step: int = 4) -> list[dict[str, Any]]:
    """Rows of `samples.jsonl` with `pieces`, one `(text, id, logprob, version, shade,
    trained)` a token.

    Texts come from the tokenizer in the run's folder or in the configured model folder. Without
    one, each token shows its id.
    """
    decode = _find_decoder(run)
    samples = run.samples(num_steps=num_steps, per_step=per_step)
    for sample in samples:
        ids: list[int] = sample["token_ids"][:MAX_TOKENS]
        texts = (
            [f"{token_id} " for token_id in ids] if decode is None else split_pieces(ids, decode)
        )
        sample["pieces"] = [
            (text, token_id, logprob, version, _shade(logprob), trained)
            for text, token_id, logprob, version, trained in zip(
                texts,
                ids,
                sample["logprobs"],
                sample["weight_versions"],
                sample["loss_mask"],
                strict=False,
            )
        ]
        sample["num_tokens"] = len(sample["token_ids"])
        sample["num_hidden"] = sample["num_tokens"] - len(ids)
    return samples


def split_pieces(token_ids: Sequence[int], decode: Decode) -> list[str]:
    """The text that each token adds, so that the pieces joined are the decoded text.

    Tokens that end inside a character add nothing; the token that completes it adds all of it.
    Decoding starts one token back, because some tokenizers drop a leading space.
    """
    pieces: list[str] = []
    context: list[int] = []
    pending: list[int] = []
    for token_id in token_ids:
        pending.append(token_id)
        text = decode([*context, *pending])[len(decode(context)) :]
        if text.endswith("�") and len(pending) < 4:
            pieces.append("")
            continue
        pieces.append(text)
        context, pending = pending if "�" not in text else [], []
    return pieces


def _shade(logprob: float | None) -> int:
    """0 (certain) to 8 (a probability of e^-8 or less), 9 for what is no number."""
    return 9 if logprob is None else min(round(-logprob), 8) if logprob < 0 else 0


def _find_decoder(run: RunFolder) -> Decode | None:
    folders = [run.path / "model", *sorted(run.path.glob("checkpoints/step_*"), reverse=True)]
    named = [run.setting("model.tokenizer"), run.setting("model.path")]
    for folder in [*folders, *(Path(name) for name in named if name)]:
        file = folder / "tokenizer.json"
        if file.is_file():
            tokenizer = Tokenizer.from_file(str(file))
            return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)
    return None
