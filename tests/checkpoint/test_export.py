"""An exported folder is an ordinary Hugging Face model with the same log-probabilities."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from hone.checkpoint import export as export_module
from hone.checkpoint.atomic import CheckpointError, read_manifest
from hone.checkpoint.export import export_adapter, export_hf, rehearse_export
from hone.distributed.mesh import Mesh
from hone.errors import UserError
from hone.models.adapted import merged_weights
from hone.models.adapters import adapt
from hone.models.manifest import export_weights
from hone.models.settings import LoraConfig
from hone.models.tiny import make_char_tokenizer, make_tiny_model

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


def export(model: PreTrainedModel, tokenizer: Any, folder: Path, dtype: torch.dtype) -> Path:
    """By one process that holds all weights."""
    weights = export_weights(model)
    return export_hf(model, tokenizer, folder, dtype, weights, mesh=Mesh.alone("cpu"))


@torch.no_grad()
def logprobs(model: PreTrainedModel) -> Tensor:
    return model(IDS).logits.float().log_softmax(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tiny", CASES, indirect=True, ids=str)
def test_R17_export_loads_with_equal_logprobs(
    tiny: tuple[PreTrainedModel, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    model, tokenizer = tiny
    folder = export(model, tokenizer, tmp_path / "out", dtype)
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
    folder = export(model, tokenizer, tmp_path / "out", torch.bfloat16)
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
    folder = export(model, tokenizer, tmp_path / "out", torch.float32)
    export(model, tokenizer, folder, torch.bfloat16)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    with pytest.raises(ValueError, match="not ours to replace"):
        export(model, tokenizer, tmp_path / "source", torch.float32)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_R18_a_failed_export_leaves_the_former_one(
    tiny: tuple[PreTrainedModel, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = tiny
    folder = export(model, tokenizer, tmp_path / "out", torch.float32)
    before = read_manifest(folder)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tokenizer, "save_pretrained", full)
    with pytest.raises(
        CheckpointError, match=r"out \(run\.dir\): .*No space left on device.*it needs"
    ):
        export(model, tokenizer, folder, torch.float32)
    assert read_manifest(folder) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


class DropNorm(export_module._Files):
    def add(self, name: str, tensor: Tensor) -> None:
        if name != "model.norm.weight":
            super().add(name, tensor)


class NoCast(export_module._Files):
    def add(self, name: str, tensor: Tensor) -> None:
        self._dtype = tensor.dtype
        super().add(name, tensor)


class Shifted(export_module._Files):
    def add(self, name: str, tensor: Tensor) -> None:
        super().add(name, tensor + 1)


PLANTED = {
    "tied twice": ("_tied_copies", lambda model: set()),
    "a tensor lost": ("_Files", DropNorm),
    "not rounded": ("_Files", NoCast),
    "other values": ("_Files", Shifted),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_R17_planted_export_bugs_turn_red(
    planted: str,
    tiny: tuple[PreTrainedModel, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(export_module, *PLANTED[planted])
    with pytest.raises(AssertionError):
        test_R17_export_loads_with_equal_logprobs(tiny, torch.bfloat16, tmp_path)


@pytest.mark.parametrize("tiny", CASES, indirect=True, ids=str)
def test_files_are_those_of_save_pretrained(
    tiny: tuple[PreTrainedModel, Any], tmp_path: Path
) -> None:
    model, tokenizer = tiny
    folder = export(model, tokenizer, tmp_path / "out", torch.float32)
    model.save_pretrained(tmp_path / "wanted")
    wanted = load_file(tmp_path / "wanted" / "model.safetensors")
    found = load_file(folder / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    for name in ("config.json", "generation_config.json"):
        assert (folder / name).read_text() == (tmp_path / "wanted" / name).read_text()


def test_tensors_of_experts_go_into_files_under_their_names_on_the_hub(tmp_path: Path) -> None:
    """Transformers keeps a layer's experts in one tensor, files have one of each."""
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        moe_intermediate_size=24,
        num_experts=4,
        num_experts_per_tok=2,
    )
    model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(tmp_path / "wanted")
    wanted = load_file(tmp_path / "wanted" / "model.safetensors")
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in wanted
    args = model, make_char_tokenizer("ab"), tmp_path / "out", torch.float32
    num_bytes = rehearse_export(*args, mesh=Mesh.alone("cpu"))
    folder = export(*args)
    found = load_file(folder / "model.safetensors")
    assert num_bytes == sum(tensor.nbytes for tensor in found.values())
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("file_bytes", [1, 10_000])
@pytest.mark.parametrize("tiny", CASES, indirect=True, ids=str)
def test_several_files_hold_what_one_does(
    tiny: tuple[PreTrainedModel, Any], file_bytes: int, tmp_path: Path
) -> None:
    model, tokenizer = tiny
    expected = export(model, tokenizer, tmp_path / "one", torch.bfloat16)
    folder = export_hf(
        model,
        tokenizer,
        tmp_path / "several",
        torch.bfloat16,
        export_weights(model),
        mesh=Mesh.alone("cpu"),
        file_bytes=file_bytes,
    )
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    wanted = load_file(expected / "model.safetensors")
    assert index["weight_map"].keys() == wanted.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in wanted.values())
    files = {name: load_file(folder / name) for name in set(index["weight_map"].values())}
    for name, file in index["weight_map"].items():
        assert torch.equal(files[file][name], wanted[name])
    for held in files.values():
        assert len(held) == 1 or sum(tensor.nbytes for tensor in held.values()) <= file_bytes
    assert set(read_manifest(folder).files) >= {*files, "model.safetensors.index.json"}
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    again: Any = AutoModelForCausalLM.from_pretrained(expected, attn_implementation="eager").eval()
    assert torch.equal(logprobs(loaded), logprobs(again))


@pytest.mark.parametrize(
    "given",
    [
        {"do_sample": False, "temperature": 0.6, "top_p": 0.9},
        {"do_sample": False, "top_k": 20, "min_p": 0.1},
        {"pad_token_id": -1},
        {"early_stopping": True},
    ],
    ids=str,
)
def test_a_generation_config_is_written_as_it_came(
    given: dict[str, Any], tiny: tuple[PreTrainedModel, Any], tmp_path: Path
) -> None:
    """Transformers loads those that are published so, and refuses to save them."""
    model, tokenizer = tiny
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    model.generation_config = GenerationConfig.from_pretrained(tmp_path)
    folder = export(model, tokenizer, tmp_path / "out", torch.float32)
    written = json.loads((folder / "generation_config.json").read_text())
    assert {key: written[key] for key in given} == given


def test_R18_adapters_are_replaced_whole_or_not_at_all(
    tiny: tuple[PreTrainedModel, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that versions before have left without a manifest, whole or half."""
    model, _ = tiny
    folder, mesh = tmp_path / "adapter", Mesh.alone("cpu")

    def write(rank: int) -> None:
        named = [(f"layers.0.q_proj.lora_{half}", torch.full((rank, 8), rank)) for half in "AB"]
        export_adapter(model, LoraConfig(rank=rank), folder, named, mesh=mesh, step=rank)

    def held() -> list[int]:
        """The rank of the tensors and that of the configuration."""
        tensors = load_file(folder / "adapter_model.safetensors")
        config = json.loads((folder / "adapter_config.json").read_text())
        return [next(iter(tensors.values())).shape[0], config["r"]]

    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"half")
    write(2)
    assert held() == [2, 2]
    assert read_manifest(folder).metadata == {"step": 2}
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", failing)
        with pytest.raises(KeyError):
            write(3)
    assert held() == [2, 2], "the tensors were there, their configuration was not"
    write(3)
    assert held() == [3, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "source"]


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("tiny", CASES[:2], indirect=True, ids=str)
def test_a_rehearsal_knows_the_bytes_and_leaves_nothing(
    rank: int, tiny: tuple[PreTrainedModel, Any], tmp_path: Path
) -> None:
    model, tokenizer = tiny
    if rank:
        adapt(model, LoraConfig(rank=rank), seed=0)
    before = sorted(tmp_path.iterdir())
    args = model, tokenizer, tmp_path / "out", torch.bfloat16
    num_bytes = rehearse_export(*args, mesh=Mesh.alone("cpu"))
    assert sorted(tmp_path.iterdir()) == before
    weights = merged_weights(model, export_weights(model))
    folder = export_hf(*args, weights, mesh=Mesh.alone("cpu"))
    written = load_file(folder / "model.safetensors")
    assert num_bytes == sum(tensor.nbytes for tensor in written.values())


def test_a_rehearsal_finds_what_an_export_would_fail_at(
    tiny: tuple[PreTrainedModel, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = tiny

    def rehearse(folder: Path) -> None:
        rehearse_export(model, tokenizer, folder, torch.float32, mesh=Mesh.alone("cpu"))

    with pytest.raises(ValueError, match="not ours to replace"):
        rehearse(tmp_path / "source")
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"Could not write .*\(run\.dir\)"):
        rehearse(tmp_path / "file" / "out")
    for part in ("model.config", "tokenizer"):
        with monkeypatch.context() as patch:
            owner = tokenizer if part == "tokenizer" else type(model.config)
            patch.setattr(owner, "save_pretrained", failing)
            with pytest.raises(UserError, match=r"transformers does not write its .*\(KeyError"):
                rehearse(tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(export_module, "revert_weight_conversion", failing)
        with pytest.raises(UserError, match="the names of its tensors"):
            rehearse(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "source"]


def failing(*_: Any, **__: Any) -> None:
    raise KeyError("a name")
