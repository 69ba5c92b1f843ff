"""Training of hybrid models in one process: shared prompts, recomputation, values, float8."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from hone.families.registry import inputs_of
from hone.models.load import load_value_model
from hone.models.settings import ModelConfig
from hone.trainer import precision
from hone.trainer.collating import collate
from hone.trainer.precision import multiply_in_float8
from tests.models.families import family_folder
from tests.recurrent.models import hybrid_model, passes_of, rows_of
from tests.tables import table
from tests.trainer import float8_twin
from tests.trainer.examples import gradients, make_trainer, random_rows
from tests.trainer.test_prefixes import REWRITTEN, episode_rows

GROUPS = partial(random_rows, 8, seed=3, shared_prompt=40)


def gradient_of(rows: Any, *, shares: bool = True, **settings: Any) -> dict[str, Tensor]:
    torch.manual_seed(4)
    trainer = make_trainer(hybrid_model(torch.float32), **settings)
    trainer.batcher = replace(trainer.batcher, shares_prefixes=shares)
    trainer.forward_backward(rows)
    return gradients(trainer)


ROWS: dict[str, Any] = {"groups": GROUPS, "rewritten histories": partial(episode_rows, REWRITTEN)}


@table("rows", ROWS)
@table("cap", [512, 60])
def test_rows_that_share_a_prompt_train_as_rows_that_do_not(rows: str, cap: int):
    drawn = ROWS[rows]()
    found, wanted = (
        gradient_of(drawn, shares=shares, max_tokens_per_microbatch=cap) for shares in (True, False)
    )
    largest = max(float(gradient.norm()) for gradient in wanted.values())
    for name, gradient in wanted.items():
        error = float((found[name] - gradient).norm()) / max(float(gradient.norm()), 1e-3 * largest)
        assert error < 1e-3, (name, error)


@table("recompute", ["full", "selective", "uniform:2", "block:3"])
def test_layers_that_are_recomputed_have_the_same_bits(recompute: str):
    """Also of completions whose prompt's state is computed again."""
    rows = GROUPS()
    found, wanted = (gradient_of(rows, recompute=mode) for mode in (recompute, "off"))
    for name, gradient in wanted.items():
        assert torch.equal(found[name], gradient), name


def test_values_of_packed_rows_are_those_of_each_alone():
    cfg = ModelConfig(path=str(family_folder("qwen3_5_text")))
    model = load_value_model(cfg, device="cpu", seed=0)
    assert not model.score.weight.any()
    torch.nn.init.normal_(model.score.weight)
    twin: Any = AutoModelForSequenceClassification.from_config(
        model.config, dtype=torch.float32, attn_implementation="eager"
    )
    twin.load_state_dict(model.state_dict())
    prompt = [5, 9, 11]
    rows = rows_of([(3, 1), (3, 7), (3, 70)], prompt=prompt)
    for row in rows:
        row.token_ids = [token % 64 for token in row.token_ids]
    wanted = []
    for row in rows:
        ids = torch.tensor([row.token_ids])
        hidden = twin.model(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]
        wanted.append((hidden @ twin.score.weight.T).squeeze(-1)[torch.tensor(row.loss_mask[1:])])
    for prefixes in (None, [3, 3, 3]):
        batch = collate(rows, [1.0] * 3, "cpu", prefixes=prefixes, inputs=inputs_of(model.config))
        found = passes_of(model).forward(batch, frozenset({"values"}))["values"]
        torch.testing.assert_close(found, torch.cat(wanted), atol=1e-4, rtol=1e-4)


@pytest.fixture
def float8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(sys.prefix) / "fp8")
    pytest.importorskip("torchao", reason="the extra fp8 is not installed")
    monkeypatch.setattr(torch, "_scaled_mm", float8_twin.scaled_mm)
    monkeypatch.setattr(precision, "require_matmul_precision", lambda *_: None)


def test_float8_leaves_decays_as_they_are(float8: None):
    wide = {"linear_num_value_heads": 16, "linear_num_key_heads": 16, "linear_key_head_dim": 8}
    model = hybrid_model(torch.bfloat16, **wide)
    multiply_in_float8(model)
    kinds = {name.rpartition(".")[2]: type(m).__name__ for name, m in model.named_modules()}
    assert {kinds[name] for name in ("in_proj_a", "in_proj_b")} == {"Linear"}
    rounded = ("in_proj_qkv", "in_proj_z", "out_proj", "q_proj", "o_proj", "up_proj", "down_proj")
    assert {kinds[name] for name in rounded} == {"Float8Linear"}
    assert all(bool(x.isfinite().all()) for x in make_trainer(model).logprobs(GROUPS()))


def test_widths_that_are_no_multiples_are_left_by_name_too():
    assert not precision._fits(torch.nn.Linear(32, 16), "linear_attn.in_proj_a")
    assert precision._fits(torch.nn.Linear(32, 16), "linear_attn.in_proj_z")
    assert not precision._fits(torch.nn.Linear(32, 12), "linear_attn.in_proj_z")
