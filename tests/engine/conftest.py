from dataclasses import dataclass

import pytest
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from hone.engine.engine import EmbeddedEngine
from hone.engine.settings import EngineConfig
from hone.models.load import load_model
from hone.models.manifest import build_manifest
from hone.models.settings import ModelConfig
from hone.models.tiny import make_char_tokenizer, make_tiny_model

FAMILY_FIELDS = {
    "qwen3": {},
    "llama": {},
    "gemma2": {"sliding_window": 9, "query_pre_attn_scalar": 16, "num_layers": 3},
    "mistral": {"sliding_window": 7},
    "qwen3_5_text": {
        "initializer_range": 0.1,
        "num_layers": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
    },
}


@dataclass(slots=True)
class Models:
    """The same weights twice: with our attention, and the stock model as a reference."""

    hone: PreTrainedModel
    plain: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def engine(self, *, eos_token_ids=(), with_tokenizer=False, in_flight=0, **fields):
        """`in_flight` 1 lets the host learn tokens a step late, as on CUDA."""
        sizes = {"block_size": fields.pop("block_size", 4)}
        sizes["max_model_len"] = fields.pop("max_model_len", 64)
        engine = EmbeddedEngine(
            self.hone,
            EngineConfig(**{"max_num_seqs": 8, **fields}),
            **sizes,
            eos_token_ids=eos_token_ids,
            tokenizer=self.tokenizer if with_tokenizer else None,
        )
        engine._max_in_flight = in_flight
        return engine

    @staticmethod
    def manifest(engine, *, version):
        """The manifest that confirms the engine's weights as they are."""
        return build_manifest(engine.named_weights(), version)


@pytest.fixture(scope="session")
def make_models(tmp_path_factory):
    made = {}

    def make(family="qwen3", **changes):
        """With `changes` of fields."""
        key = family, *map(str, changes.items())
        if key not in made:
            tokenizer = make_char_tokenizer("abcdefghijklmnopqrstuvwxyz 0123456789")
            fields = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2}
            fields |= {"head_dim": 8, "intermediate_size": 64, "initializer_range": 0.25}
            folder = make_tiny_model(
                tmp_path_factory.mktemp(family),
                family=family,
                tokenizer=tokenizer,
                seed=5,
                **fields | FAMILY_FIELDS[family] | changes,
            )
            plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
            made[key] = Models(
                load_model(ModelConfig(path=str(folder)), device="cpu", seed=0), plain, tokenizer
            )
        return made[key]

    return make


@pytest.fixture
def models(make_models):
    return make_models("qwen3")
