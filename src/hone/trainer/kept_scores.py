"""Log-probabilities of a frozen model, computed once for all rows of a run and kept in a file.

    <folder>/<digest>.npy       [N] float32, trained tokens of all rows, one row's after the other's

The digest covers everything that the values depend on: weights, rows, settings, torch and device.
So a file is never wrong: after a change another file is used.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hone.algorithms.algorithm import Outputs
from hone.algorithms.settings import Output
from hone.errors import UserError
from hone.observe.disk import writing
from hone.trainer.scorer import RowScorer
from hone.trainer.trainer import Trainer
from hone.types import Row

__all__ = ["KeptScores"]

_log = logging.getLogger(__name__)

Values = npt.NDArray[np.float32]


class KeptScores:
    """A `RowScorer` that looks up the scores of rows by their ids."""

    def __init__(self, rows: Sequence[Row], values: Values) -> None:
        """`values` are in the layout of the file."""
        parts = torch.from_numpy(values).split([row.num_trained for row in rows])
        self._known = dict(zip((row.id for row in rows), parts, strict=True))

    @classmethod
    def of(
        cls, rows: Sequence[Row], scorer: RowScorer, trainer: Trainer, folder: Path, settings: str
    ) -> KeptScores:
        """The scores of `rows` by `scorer`, read from the file or computed and written. `scorer`
        must compute with the present weights of `trainer`; `settings` names all else that the
        scores depend on. Collective.

        Raises UserError where the file is damaged, DiskError where it cannot be written.
        """
        mesh, device = trainer.mesh, trainer.mesh.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        path = folder / f"{_digest(trainer, rows, f'{settings} {torch.__version__} {name}')}.npy"
        values = mesh.broadcast(_read(path, rows) if mesh.is_first else None)
        if values is None:
            outputs = frozenset[Output]({"logprobs"})
            scores = [of_row["logprobs"] for of_row in scorer.begin(rows, outputs)()]
            values = torch.cat([torch.empty(0), *scores]).numpy()
            if mesh.is_first:
                _write(path, values)
                template = "%s rows scored by the reference, and kept in %s"
                _log.info(template, f"{len(rows):,}", path)
        elif mesh.is_first:
            _log.info("logprobs of %s rows by the reference read from %s", f"{len(rows):,}", path)
        return cls(rows, values)

    def begin(self, rows: Sequence[Row], outputs: frozenset[Output]) -> Callable[[], list[Outputs]]:
        """Look the scores up; nothing is computed. Raises KeyError for an unknown row."""
        assert outputs == {"logprobs"}, f"{outputs=}"
        scores: list[Outputs] = [{"logprobs": self._known[row.id]} for row in rows]
        return lambda: scores


def _digest(trainer: Trainer, rows: Sequence[Row], settings: str) -> str:
    digest = hashlib.blake2b(settings.encode(), digest_size=16)
    for name, tensor in trainer.named_weights():  # gathered by all
        if trainer.mesh.is_first:
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(_bytes(tensor))
    for row in rows:
        content = row.id, row.token_ids, row.loss_mask, *row.model_input.key
        digest.update(repr(content).encode())
    return trainer.mesh.broadcast(digest.hexdigest())


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().data


def _read(path: Path, rows: Sequence[Row]) -> Values | None:
    """The values of the file; None where it does not exist."""
    if not path.exists():
        return None
    num_tokens = sum(row.num_trained for row in rows)
    try:
        values: Values = np.load(path)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"cannot read {path}: {error}; remove it to have it made anew") from error
    if values.shape != (num_tokens,) or values.dtype != np.float32:
        raise UserError(f"{path} holds other values than its name says; remove it")
    return values


def _write(path: Path, values: Values) -> None:
    """Write the file atomically."""
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    with writing(path, "algorithm.reference_cache", values.nbytes):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with unfinished.open("xb") as file:
                np.save(file, values)
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)
