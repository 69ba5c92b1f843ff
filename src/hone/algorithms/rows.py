"""The rows of a sample: one, or one for each path of an agent that rewrote its history.

Each sampled token is trained in one row, the first that has it; in later rows it is context. All
rows of a sample are one `Row.episode`: they have its reward, it counts once in the baseline of its
group, and the rows together have the weight of a single sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hone.algorithms.aggregation import AGGREGATIONS, Aggregation
from hone.types import NOT_SAMPLED, Branch, Column, Routes, Row, Sample

__all__ = ["Episode", "episodes_of", "padded_routes", "row_weights", "rows_of"]


@dataclass(frozen=True, slots=True)
class Episode:
    """A sample and its rows. Tensors have one value for each of its N trained tokens, in the order
    in which they were sampled."""

    sample: Sample
    rows: Sequence[Row]

    @property
    def num_trained(self) -> int:
        """Number of trained tokens of all rows (N)."""
        return sum(row.num_trained for row in self.rows)

    def column(self, name: str) -> Tensor:
        """The values [N] of a column of the rows. Raises KeyError as `Row.column`."""
        return torch.cat([row.column(name) for row in self.rows])

    def add_column(self, name: str, values: Tensor) -> None:
        """Add a column from its values [N]."""
        parts = values.split([row.num_trained for row in self.rows])
        for row, part in zip(self.rows, parts, strict=True):
            row.columns[name] = Column(part)


def rows_of(sample: Sample, group_id: str, version: int) -> list[Row]:
    """The rows of a sample, in the order in which their paths were sampled. `version` is that of
    the weights about to be trained."""
    return [
        _row(name, path, sample.id, group_id, version)
        for name, path in sample.trained_paths.items()
    ]


def _row(name: str, path: Branch, episode: str, group_id: str, version: int) -> Row:
    """A path as a row, with its recorded token ids, loss mask, log-probabilities and routes.

    Staleness never falls along a path: a token sampled by the current weights after a token of
    older weights counts as stale too, since it may have attended to keys and values of the older
    weights, and the trainer cannot reproduce its log-probability. Tokens that an environment
    inserted were sampled by no weights and have age 0. A new path starts afresh, since its context
    is a prompt, whose keys and values the weights of its first token have computed.
    """
    mask = np.asarray(path.loss_mask, dtype=bool)
    logprobs = np.asarray(path.logprobs)[mask].astype(np.float32)
    versions = np.asarray(path.weight_versions, dtype=np.int32)
    ages = np.where(versions == NOT_SAMPLED, 0, version - versions)
    staleness = np.maximum.accumulate(ages)[mask].astype(np.int32)
    columns = {
        "logprobs/engine": Column(torch.from_numpy(logprobs)),
        "staleness": Column(torch.from_numpy(staleness)),
    }
    token_ids = [*path.prompt_ids, *path.token_ids]
    if path.routes is not None:
        columns["routes"] = Column(padded_routes(path.routes, len(token_ids)), per="token")
    return Row(
        id=name,
        group_id=group_id,
        episode=episode,
        token_ids=token_ids,
        loss_mask=[False] * len(path.prompt_ids) + mask.tolist(),
        model_input=path.model_input,
        columns=columns,
    )


def padded_routes(routes: Routes, num_tokens: int) -> Tensor:
    """Routes padded to `num_tokens` with the largest value of the dtype, at which the router
    chooses for itself: at the last token, and at tokens inserted after the last turn."""
    padded = np.full((num_tokens, *routes.shape[1:]), np.iinfo(routes.dtype).max, routes.dtype)
    padded[: len(routes)] = routes
    return torch.from_numpy(padded)


def row_weights(name: Aggregation, rows: Sequence[Row], max_completion_tokens: int) -> list[float]:
    """The weight of each row's tokens: that of one sequence with all trained tokens of the row's
    episode. `rows` are all rows of an optimizer step.

    So an agent that rewrites its history often counts no more than one that never does. slime and
    miles divide by the trained tokens of a whole rollout in the same way (`rollout_mask_sums`).
    """
    episodes = episodes_of(rows)
    num_trained = [sum(rows[i].num_trained for i in episode) for episode in episodes]
    weights = [0.0] * len(rows)
    of_episodes = AGGREGATIONS[name](num_trained, max_completion_tokens)
    for episode, weight in zip(episodes, of_episodes, strict=True):
        for index in episode:
            weights[index] = weight
    return weights


def episodes_of(rows: Sequence[Row]) -> list[list[int]]:
    """Row indices of each episode, in the order of their first rows."""
    episodes: dict[str | int, list[int]] = {}
    for index, row in enumerate(rows):
        episodes.setdefault(row.episode or index, []).append(index)
    return list(episodes.values())
