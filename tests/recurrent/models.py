"""A tiny Qwen3.5, and the rows of transformers that it is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hone.distributed.mesh import Mesh
from hone.trainer.parallel_model import ParallelModel
from hone.trainer.settings import TrainerConfig
from hone.types import Row
from tests.trainer.examples import eager_twin, tiny_model

VOCAB = 97
HYBRID: dict[str, Any] = {
    "family": "qwen3_5_text",
    "vocab_size": VOCAB,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "tie_word_embeddings": False,
}


def hybrid_model(dtype: torch.dtype = torch.float64, **fields: Any) -> PreTrainedModel:
    """Norms and time steps away from where they start, and decays with which a state has a memory
    of ten tokens: most of those that transformers draws forget a token at the next one."""
    model = tiny_model(dtype=dtype, **HYBRID | fields)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn_like(parameter)
            if name.endswith("A_log"):
                parameter -= 4
    return model


def twin_of(model: PreTrainedModel) -> PreTrainedModel:
    """transformers' own model of these weights, in float64 with eager attention."""
    return eager_twin(model)


def passes_of(model: PreTrainedModel, **settings: Any) -> ParallelModel:
    return ParallelModel(model, TrainerConfig.model_validate(settings), Mesh.alone("cpu"))


def logprobs_alone(twin: PreTrainedModel, row: Row) -> Tensor:
    """Log-probabilities [N] of a row's trained tokens, by a forward of transformers."""
    ids = torch.tensor(row.token_ids)
    logits = twin(input_ids=ids[None], use_cache=False).logits[0, :-1]
    chosen = logits.double().log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return chosen[torch.tensor(row.loss_mask[1:])]


def gradients_of(model: torch.nn.Module, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def check_gradients(
    found: dict[str, Tensor], wanted: dict[str, Tensor], *, limit: float = 1e-8
) -> None:
    assert found.keys() == wanted.keys()
    largest = max(float(gradient.norm()) for gradient in wanted.values())
    for name, expected in wanted.items():
        scale = max(float(expected.norm()), 1e-4 * largest)
        error = float((found[name] - expected).norm()) / scale
        assert error < limit, (name, error)


def rows_of(lengths: Sequence[tuple[int, int]], *, prompt: Sequence[int] = ()) -> list[Row]:
    """Rows of a prompt and a completion of these lengths, of one group; with `prompt` all begin
    with its tokens."""
    rows = []
    for number, (num_prompt, num_completion) in enumerate(lengths):
        drawn = torch.randint(VOCAB, (num_prompt + num_completion,)).tolist()
        ids = [*prompt[:num_prompt], *drawn[len(prompt[:num_prompt]) :]]
        mask = [False] * num_prompt + [True] * num_completion
        rows.append(Row(id=f"r{number}", group_id="g", token_ids=ids, loss_mask=mask))
    return rows
