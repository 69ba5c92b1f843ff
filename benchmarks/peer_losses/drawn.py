"""Random rows, models and stand-ins for trainers that all comparisons take."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hone.algorithms.algorithm import Objective, Outputs
from hone.observe.metrics import to_scalars
from hone.trainer.collating import collate
from hone.types import Column, Row

Found = Iterator[tuple[str, str, str, Any, Any]]
"""What, whose, how they were brought together, hone's number or tensors, the peer's."""


class Draw:
    """Random numbers of one seed."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(*shape, generator=self._generator, dtype=torch.float64)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self._generator)

    def mask(self, lengths: Tensor) -> Tensor:
        return torch.arange(int(lengths.max()))[None] < lengths[:, None]


@dataclass(frozen=True, slots=True)
class Tokens:
    """Rows of one token and a completion each, padded: logits [S, L + 1, V], ids [S, L + 1]; the
    token at t is predicted by the logits at t - 1."""

    ids: Tensor
    lengths: Tensor
    logits: Tensor
    reference: Tensor

    @classmethod
    def of(cls, draw: Draw, number: int, *, vocabulary: int = 11) -> Tokens:
        lengths = draw.integers(1, 8, number)
        shape = (number, int(lengths.max()) + 1)
        logits = draw.normal(*shape, vocabulary, scale=2.0)
        reference = logits + draw.normal(*shape, vocabulary)
        ids = draw.integers(0, vocabulary, *shape)
        return cls(ids, lengths, logits.requires_grad_(), reference)

    @property
    def mask(self) -> Tensor:
        """Of completions, [S, L]."""
        return torch.arange(self.ids.shape[1] - 1)[None] < self.lengths[:, None]

    def logprobs(self, logits: Tensor) -> Tensor:
        """[S, L], 0 behind a completion."""
        labels = self.ids[:, 1:, None]
        return logits[:, :-1].log_softmax(-1).gather(-1, labels)[..., 0] * self.mask

    def model(self, **fields: Any) -> Any:
        """What TRL's model with a fused head gives."""
        del fields
        return SimpleNamespace(
            logits=self.logits,
            log_probs=self.logprobs(self.logits),
            entropy=torch.zeros(self.mask.shape),
            mean_logits=self.logits[:, :-1].mean(-1),
            is_top1=torch.zeros(self.mask.shape, dtype=torch.bool),
        )

    @property
    def inputs(self) -> dict[str, Tensor]:
        mask = torch.cat([torch.zeros(len(self.ids), 1, dtype=torch.bool), self.mask], 1)
        return {
            "input_ids": self.ids,
            "completion_mask": mask.long(),
            "attention_mask": torch.ones_like(self.ids),
        }

    def rows(self, indices: Sequence[int]) -> list[Row]:
        logprobs = self.logprobs(self.reference).detach()
        return [
            Row(
                id=str(i),
                token_ids=self.ids[i, : length + 1].tolist(),
                loss_mask=[False] + [True] * length,
                columns={"logprobs/reference": Column(logprobs[i, :length])},
            )
            for i in indices
            for length in [int(self.lengths[i])]
        ]

    def outputs(self, indices: Sequence[int]) -> Outputs:
        """What hone's trainer hands an objective, of rows packed in that order."""
        logprobs, means = self.logprobs(self.logits), self.logits[:, :-1].mean(-1).detach()
        of_rows = [slice(0, int(self.lengths[i])) for i in indices]
        pieces = list(zip(indices, of_rows, strict=True))
        return {
            "logprobs": torch.cat([logprobs[i, own] for i, own in pieces]),
            "mean_logits": torch.cat([means[i, own] for i, own in pieces]),
        }


def trainer(**fields: Any) -> Any:
    """A stand-in for one of TRL's, in training, alone."""
    accelerator = SimpleNamespace(
        device=torch.device("cpu"),
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        reduce=lambda x, **_: x,
        num_processes=1,
    )
    return SimpleNamespace(
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        **fields,
    )


def bound(function: Any, owner: Any) -> Callable[..., Any]:
    """A method of a stand-in for its object."""
    return lambda *args, **fields: function(owner, *args, **fields)


def summed(objective: Objective, rows: list[Row], outputs: Outputs) -> tuple[Tensor, Any]:
    """The loss of a step as the trainer sums it, its weights in float64, and the metrics."""
    weights = objective.weights(rows)
    batch = collate(rows, weights, "cpu", per=objective.per)
    found = objective(outputs, batch)
    of_rows = torch.tensor(weights, dtype=torch.float64)
    match objective.per:
        case "trained":
            carried = of_rows[batch.sequence_index]
        case "row":
            carried = of_rows
        case "unit":
            carried = of_rows.new_zeros(batch.num_units)
            carried[batch.unit_index] = of_rows
    return (found.values * carried).sum(), to_scalars(found.metrics)


def graded(own: Tensor, expected: Tensor, leaf: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each loss with its gradient."""
    for loss in (own, expected):
        yield loss.detach(), torch.autograd.grad(loss, leaf, retain_graph=True)[0]
