"""Log-probabilities of a frozen model, computed once for all rows of a run and kept in a file.

    <folder>/<digest>.npy       [N] float32, trained tokens of all rows, one row's after the other's

The digest is of everything that they follow from: weights, rows, settings, torch and device. So a
file is never wrong, only no longer asked for; with anything changed there is another.
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
from hone.config.algorithm import Output
from hone.errors import UserError
from hone.observe.disk import writing
from hone.trainer.scorer import RowScorer
from hone.trainer.trainer import Trainer
from hone.types import Row

__all__ = ["KeptScores"]

_log = logging.getLogger(__name__)

Values = npt.NDArray[np.float32]


class KeptScores:
    """Implements `RowScorer` for rows that were scored before, which it knows by their ids."""

    def __init__(self, rows: Sequence[Row], values: Values) -> None:
        """`values` as in the file."""
        parts = torch.from_numpy(values).split([row.num_trained for row in rows])
        self._known = dict(zip((row.id for row in rows), parts, strict=True))

    @classmethod
    def of(
        cls, rows: Sequence[Row], scorer: RowScorer, trainer: Trainer, folder: Path, settings: str
    ) -> KeptScores:
        """Those of `scorer`, which says what the weights of `trainer` say as they are now: from the
        file, or computed and written. `settings` is what else the numbers follow from. Collective.

        Raises UserError where the file is damaged, DiskError where it cannot be written.
        """
        mesh, device = trainer.mesh, trainer.mesh.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        path = folder / f"{_digest(trainer, rows, f'{settings} {torch.__version__} {name}')}.npy"
        values = mesh.broadcast(_read(path, rows) if mesh.is_first else None)
        if values is None:
            outputs = frozenset[Output]({"logprobs"})
            found = [of_row["logprobs"] for of_row in scorer.begin(rows, outputs)()]
            values = torch.cat([torch.empty(0), *found]).numpy()
            if mesh.is_first:
                _write(path, values)
                told = "%s rows scored by the reference, and kept in %s"
                _log.info(told, f"{len(rows):,}", path)
        elif mesh.is_first:
            _log.info("what the reference says of %s rows: %s", f"{len(rows):,}", path)
        return cls(rows, values)

    def begin(self, rows: Sequence[Row], outputs: frozenset[Output]) -> Callable[[], list[Outputs]]:
        """Nothing is computed. Raises KeyError for other rows."""
        assert outputs == {"logprobs"}, f"{outputs=}"
        found: list[Outputs] = [{"logprobs": self._known[row.id]} for row in rows]
        return lambda: found


def _digest(trainer: Trainer, rows: Sequence[Row], settings: str) -> str:
    digest = hashlib.blake2b(settings.encode(), digest_size=16)
    for name, tensor in trainer.named_weights():  # gathered by all
        if trainer.mesh.is_first:
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(_bytes(tensor))
    for row in rows:
        digest.update(repr((row.id, row.token_ids, row.loss_mask)).encode())
    return trainer.mesh.broadcast(digest.hexdigest())


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().data


def _read(path: Path, rows: Sequence[Row]) -> Values | None:
    """What the file holds; None where there is none."""
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
    """Whole or not at all."""
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    with writing(path, "algorithm.reference_cache", values.nbytes):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with unfinished.open("xb") as file:
                np.save(file, values)
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)
