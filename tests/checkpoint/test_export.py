"""An exported folder is an ordinary Hugging Face model with the same log-probabilities."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hone.checkpoint import export as export_module
from hone.checkpoint.atomic import CheckpointError, read_manifest
from hone.checkpoint.export import export_hf, export_hf_streamed
from hone.distributed.mesh import Mesh
from hone.models.manifest import export_weights
from hone.models.tiny import make_tiny_model

IDS = torch.tensor([[5, 9, 33, 41, 7, 2, 60, 11]])
CASES = [("qwen3", True), ("qwen3", False), ("llama", True), ("llama", False), ("gemma2", True)]


@pytest.fixture
def tiny(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[PreTrainedModel, Any]:
    family, tied = getattr(request, "param", ("qwen3", True))
    folder = make_tiny_model(
        tmp_path / "source",
        family=family,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        intermediate_size=64,
        tie_word_embeddings=tied,
    )
    # A registered name that is not transformers' own must not end in config.json.
    import hone.attention.interface  # noqa: F401

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model, AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
def logprobs(model: PreTrainedModel) -> Tensor:
    return model(IDS).logits.float().log_softmax(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tiny", CASES, indirect=True, ids=str)
def test_R17_export_loads_with_equal_logprobs(
    tiny: tuple[PreTrainedModel, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    model, tokenizer = tiny
    folder = export_hf(model, tokenizer, tmp_path / "out", dtype)
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    assert loaded.dtype is dtype
    assert model.dtype is torch.float32
    wanted: Any = AutoModelForCausalLM.from_config(
        model.config, dtype=dtype, attn_implementation="eager"
    ).eval()
    wanted.load_state_dict(model.state_dict())
    assert torch.equal(logprobs(loaded), logprobs(wanted))
    tied = loaded.config.tie_word_embeddings
    weights = load_file(folder / "model.safetensors")
    assert ("lm_head.weight" in weights) is not tied
    assert (loaded.lm_head.weight is loaded.get_input_embeddings().weight) is tied
    assert {tensor.dtype for tensor in weights.values()} == {dtype}


def test_export_is_a_plain_folder(tiny: tuple[PreTrainedModel, Any], tmp_path: Path) -> None:
    model, tokenizer = tiny
    model.set_attn_implementation("hone")
    config_before = model.config.to_dict()
    folder = export_hf(model, tokenizer, tmp_path / "out", torch.bfloat16)
    config = json.loads((folder / "config.json").read_text())
    assert "hone" not in (folder / "config.json").read_text()
    assert config["dtype"] == "bfloat16"
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert model.config.to_dict() == config_before
    assert model.config._attn_implementation == "hone"
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.eos_token_id
    again = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "2+2"}]
    assert again.chat_template == tokenizer.chat_template
    assert again.apply_chat_template(chat) == tokenizer.apply_chat_template(chat)
    assert set(read_manifest(folder).files) >= {"config.json", "model.safetensors"}


def test_export_replaces_an_export_and_nothing_else(
    tiny: tuple[PreTrainedModel, Any], tmp_path: Path
) -> None:
    model, tokenizer = tiny
    folder = export_hf(model, tokenizer, tmp_path / "out", torch.float32)
    export_hf(model, tokenizer, folder, torch.bfloat16)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    with pytest.raises(ValueError, match="not ours to replace"):
        export_hf(model, tokenizer, tmp_path / "source", torch.float32)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_R18_a_failed_export_leaves_the_former_one(
    tiny: tuple[PreTrainedModel, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = tiny
    folder = export_hf(model, tokenizer, tmp_path / "out", torch.float32)
    before = read_manifest(folder)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tokenizer, "save_pretrained", full)
    with pytest.raises(
        CheckpointError, match=r"out \(run\.dir\): .*No space left on device.*it needs"
    ):
        export_hf(model, tokenizer, folder, torch.float32)
    assert read_manifest(folder) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def untie(model: PreTrainedModel, dtype: torch.dtype, _masters: object) -> dict[str, Tensor]:
    return {name: tensor.to(dtype).clone() + 1 for name, tensor in model.state_dict().items()}


def drop_norm(model: PreTrainedModel, dtype: torch.dtype, _masters: object) -> dict[str, Tensor]:
    state = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    del state["model.norm.weight"]
    return state


def no_cast(model: PreTrainedModel, dtype: torch.dtype, _masters: object) -> dict[str, Tensor]:
    return dict(model.state_dict())


@pytest.mark.parametrize("planted", [untie, drop_norm, no_cast], ids=lambda plant: plant.__name__)
def test_R17_planted_export_bugs_turn_red(
    planted: Any,
    tiny: tuple[PreTrainedModel, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(export_module, "_cast", planted)
    with pytest.raises(AssertionError):
        test_R17_export_loads_with_equal_logprobs(tiny, torch.bfloat16, tmp_path)


@pytest.mark.parametrize("file_bytes", [1, 10_000, 1 << 30])
@pytest.mark.parametrize("tiny", CASES, indirect=True, ids=str)
def test_streamed_export_equals_the_whole_one(
    tiny: tuple[PreTrainedModel, Any], file_bytes: int, tmp_path: Path
) -> None:
    model, tokenizer = tiny
    expected = export_hf(model, tokenizer, tmp_path / "whole", torch.bfloat16)
    folder = export_hf_streamed(
        model,
        tokenizer,
        tmp_path / "streamed",
        torch.bfloat16,
        export_weights(model),
        mesh=Mesh.alone("cpu"),
        file_bytes=file_bytes,
    )
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        assert (folder / name).read_text() == (expected / name).read_text()
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(file)
    wanted = load_file(expected / "model.safetensors")
    assert weights.keys() == wanted.keys()
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    again: Any = AutoModelForCausalLM.from_pretrained(expected, attn_implementation="eager").eval()
    assert torch.equal(logprobs(loaded), logprobs(again))


def test_streamed_export_refuses_a_folder_that_is_not_ours(
    tiny: tuple[PreTrainedModel, Any], tmp_path: Path
) -> None:
    model, tokenizer = tiny
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("do not touch")
    with pytest.raises(ValueError, match="not ours to replace"):
        export_hf_streamed(
            model,
            tokenizer,
            tmp_path / "mine",
            torch.float32,
            export_weights(model),
            mesh=Mesh.alone("cpu"),
        )
