"""Families without a spec: what the check of their forward lets through, and whole runs."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.granite.modeling_granite import GraniteModel
from transformers.models.phi3.modeling_phi3 import Phi3Attention

from hone.errors import UserError
from hone.families.registry import SPECS
from hone.loops import reinforce
from hone.models import decoder
from hone.models.load import load_model
from hone.models.parity import require_parity
from hone.models.settings import ModelConfig
from tests.models.families import VOCAB, packed_logprobs, random_samples
from tests.tables import table
from tests.tiny_runs import tiny_config, write_inputs

OTHERS: dict[str, dict[str, Any]] = {
    "glm4": {"attention_bias": True, "partial_rotary_factor": 0.5},
    "phi3": {"sliding_window": 5},
    "granite": {
        "attention_dropout": 0.1,
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
    },
    "olmo": {"clip_qkv": 2.0},
    "cohere": {"logit_scale": 4.0},
}


def checked(name: str, **fields: Any) -> None:
    require_parity(
        AutoConfig.for_model(name, **OTHERS.get(name, {}) | fields), trust_remote_code=False
    )


@table("name", OTHERS)
def test_dense_decoders_pass(name):
    assert name not in SPECS
    checked(name)


REFUSED = {
    "phi": "in packed rows, of which 0.001",  # a bias of the head
    "diffllama": "runs where packed rows give",
    "stablelm": "does not run",
    "mpt": "does not run",
}


@table("name", REFUSED)
def test_what_transformers_forward_does_not_serve_is_refused(name):
    with pytest.raises(UserError, match=f"family {name},.*{REFUSED[name]}.*Use a model of .*llama"):
        checked(name)


def without_window(original):
    def forward(self, *args, **kwargs):
        self.config.sliding_window = None
        return original(self, *args, **kwargs)

    return forward


def with_own_positions(original):
    def forward(self, *args, position_ids=None, **kwargs):
        return original(self, *args, **kwargs)

    return forward


BUGS = {
    "a window that attention is not told": ("phi3", Phi3Attention, without_window),
    "positions that are not taken": ("granite", GraniteModel, with_own_positions),
}


@pytest.mark.parametrize("bug", BUGS)
def test_the_check_catches(bug, monkeypatch):
    name, kind, plant = BUGS[bug]
    original = kind.forward
    broken = plant(original)
    is_ours = lambda module: module.config._attn_implementation == "hone"  # noqa: E731

    def forward(self, *args, **kwargs):
        return (broken if is_ours(self) else original)(self, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", forward)
    with pytest.raises(UserError, match="log-probabilities of a small model"):
        checked(name)


def test_the_check_catches_logits_that_are_not_scaled(monkeypatch):
    monkeypatch.setattr(decoder, "_logit_scale", lambda model: 1.0)
    with pytest.raises(UserError, match="in packed rows"):
        checked("granite")


@pytest.mark.parametrize("name", OTHERS)
def test_a_run_trains_samples_and_exports(name, tmp_path):
    write_inputs(tmp_path, family=name, **OTHERS[name])
    cfg = tiny_config(tmp_path, tmp_path / "run", trainer={"recompute": "full"})
    reinforce.run(cfg)
    rows = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["off_policy/mismatch_kl"] < 1e-9
    assert rows[-1]["train/grad_norm"] > 0
    source, trained = (
        load_file(path / "model.safetensors")
        for path in (tmp_path / "model", tmp_path / "run/model")
    )
    assert trained.keys() == source.keys()
    assert not any(torch.equal(source[key], trained[key]) for key in source if "proj" in key)
    model = load_model(ModelConfig(path=str(tmp_path / "run/model")), device="cpu", seed=0)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model").eval()
    samples = [ids % model.config.vocab_size for ids in random_samples([7, 5])]
    assert max(map(int, torch.cat(samples))) < VOCAB
    with torch.no_grad():
        expected = [theirs(input_ids=x[None]).logits[0].log_softmax(-1) for x in samples]
        torch.testing.assert_close(packed_logprobs(model, samples), expected, rtol=0, atol=2e-5)
