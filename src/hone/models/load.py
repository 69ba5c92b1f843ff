"""Loads models: pretrained, or with random weights in a given shape."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.core_model_loading import WeightConverter

from hone.attention import ATTENTION_NAME
from hone.attention.backends import choose_packed_backend
from hone.errors import UserError
from hone.families.config_values import impossible_values
from hone.families.registry import SPECS
from hone.families.vision.registry import VISION, VISION_FIELD
from hone.hub import locate_model
from hone.models import settings as model_config
from hone.models.contents import attach_features, attach_whole, require_features, require_whole
from hone.models.deferred import Weight, WeightSource, defer, take_source
from hone.models.heads import value_head
from hone.models.int8_rows import is_packed, pack_layers, packed_like
from hone.models.ranks import ModelRanks
from hone.models.settings import ModelConfig
from hone.models.support import check_supported, classifies, declared_eos_ids, head_dim_of
from hone.models.weight_files import (
    FileWeights,
    OtherFormatError,
    damaged,
    find_unread,
    find_weights,
    has_stacked_experts,
    keep_unread,
    lacking,
    misshapen,
    require_finite,
    without_place,
)

if TYPE_CHECKING:
    from hone.models.vision import WholeModel

__all__ = [
    "blank_model",
    "compute_dtype",
    "load_config",
    "load_deferred",
    "load_end_ids",
    "load_model",
    "load_value_model",
]

logger = logging.getLogger(__name__)
_CONVERSIONS = "_weight_conversions"
"""Attribute of a model with the conversions that transformers takes back when it writes tensors.
Without it these are all of the family."""
_QUICK_BYTES = 1 << 30
"""Bytes of weights that a disk reads in about a second."""


def compute_dtype(cfg: ModelConfig, device: torch.device | str) -> torch.dtype:
    """Dtype of forward and backward: as configured; `auto` is bfloat16 on CUDA, else float32."""
    kind = "cuda" if torch.device(device).type == "cuda" else "cpu"
    return getattr(torch, model_config.compute_dtype(cfg.dtype, kind))


def load_model(
    cfg: ModelConfig,
    *,
    device: torch.device | str | None = None,
    seed: int = 0,
    tp: ModelRanks | None = None,
    on_host: bool = False,
    packs_rows: bool = False,
) -> PreTrainedModel:
    """Load the model of `cfg` on `device` in its compute dtype, in eval mode, with hone's
    attention.

    `device` unset is the first GPU, or the CPU if torch sees none. `seed` initialises the weights
    under `init: random`. With `tp`, only this rank's parts reach the device, as `shard_model` cuts
    them. With `on_host` the same model stays in host memory, for a caller that moves it to the
    device in parts. With `packs_rows` it is packed for an engine of `engine.weight_dtype=int8`
    (`hone.models.int8_rows`).

    Raises FileNotFoundError if the folder or the weights are missing. Raises UserError if the model
    is not supported, predicts no tokens or cannot be divided, and if weights are missing, not
    finite, damaged, or have no place in the model.
    """
    device = torch.device(device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    tp = tp or ModelRanks(device)
    config = load_config(cfg)
    tp.check_divides(config)
    if cfg.init == "pretrained" and not hasattr(config, VISION_FIELD):
        _require_predicts(config, cfg)
        options = _options(cfg, device)
        model = tp.shard_model(_from_files(AutoModelForCausalLM, _place(cfg), config, options))
        if packs_rows:
            pack_layers(model, tp.device)
        # The override in transformers has no usable type.
        nn.Module.to(model, "cpu" if on_host else device)
        return model.eval()
    model = load_deferred(cfg, device=device, seed=seed)
    source = take_source(model)
    assert source is not None
    place = "cpu" if on_host else device
    return _loaded(model, source, device, tp=tp, place=place, packs_rows=packs_rows)


def _loaded(
    model: PreTrainedModel,
    source: WeightSource,
    device: torch.device,
    *,
    tp: ModelRanks,
    place: torch.device | str,
    packs_rows: bool = False,
) -> PreTrainedModel:
    """Fill a model on the meta device from its source, which computes on `device`, with tensors on
    `place`."""
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    if packs_rows:
        pack_layers(model)
    targets, tensors = dict(model.named_parameters()), dict[str, Tensor]()

    def take(weight: Weight) -> None:
        whole = weight.whole()
        whole = whole.to(dtypes.get(weight.name, whole.dtype))
        part = tp.shard_of(weight.name, whole, model.config)
        # A copy: files are mapped into memory, and a part would keep the whole.
        own = packed_like(part.clone(), targets.get(weight.name))
        tensors[weight.name] = own.to(place)

    source.give(take, device=device)
    return _filled(model, tensors, tp)


def _with_tower(
    model: PreTrainedModel, cfg: ModelConfig, device: torch.device, seed: int
) -> WholeModel | None:
    """Attach to the decoder of a vision-language model its tower on `device` and what an export
    needs of the whole model, which is returned; None for a text model."""
    if not hasattr(model.config, VISION_FIELD):
        return None
    from hone.images.store import STORE
    from hone.models.features import FeatureSource
    from hone.models.vision import WholeModel

    whole = WholeModel.of(
        _place(cfg), _parsed(cfg), dtype=compute_dtype(cfg, device), drawn=cfg.init == "random"
    )
    attach_whole(model, whole)
    tower, max_bytes = whole.tower(device, seed=seed), int(cfg.image_cache_gib * 2**30)
    attach_features(model, FeatureSource(tower, STORE.pixels, max_bytes=max_bytes))
    if whole.weights is not None:
        _keep_files(model, whole.weights)
    return whole


def load_value_model(
    cfg: ModelConfig, *, device: torch.device | str, seed: int, deferred: bool = False
) -> PreTrainedModel:
    """Load the backbone of `load_model` with a head for one value (`hone.models.heads`): the head
    of the folder's model, or zeros. With `deferred`, weights come as those of `load_deferred`.
    Raises as `load_model`."""
    config, options = load_config(cfg), _options(cfg, torch.device(device))
    if classifies(config) and config.num_labels != 1:
        raise UserError(
            f"{cfg.path!r} is a classifier of {config.num_labels} classes; a critic or a reward "
            "model has one label. Choose such a model, or a language model."
        )
    config.num_labels = 1
    with torch.device("meta"):
        model = _empty(AutoModelForSequenceClassification, config, options).eval()
    if cfg.init == "pretrained" and classifies(config):
        return _value_model_of_files(model, cfg, torch.device(device), seed, deferred=deferred)
    load = load_deferred if deferred else load_model
    causal = load(cfg, device=device, seed=seed)
    if hasattr(config, VISION_FIELD):
        attach_features(model, require_features(causal))
        attach_whole(model, require_whole(causal))
    if (source := take_source(causal)) is not None:
        defer(model, _BackboneWeights(source, value_head(model).in_features))
        return model
    setattr(model, model.base_model_prefix, causal.base_model)
    value_head(model).to_empty(device=causal.device)
    nn.init.zeros_(value_head(model).weight)
    return model


def _value_model_of_files(
    model: PreTrainedModel, cfg: ModelConfig, device: torch.device, seed: int, *, deferred: bool
) -> PreTrainedModel:
    """`model`, which is on the meta device, with the weights and the head of a folder."""
    if (whole := _with_tower(model, cfg, device, seed)) is not None:
        source = whole.decoder_weights(_computed_buffers(model))
        if not deferred:
            return _loaded(model, source, device, tp=ModelRanks(device), place=device)
        defer(model, source)
        return model
    if deferred and _defer_to_files(model, cfg):
        return model
    kind, options = AutoModelForSequenceClassification, _options(cfg, device)
    loaded = _from_files(kind, _place(cfg), model.config, options)
    nn.Module.to(loaded, "cpu" if deferred else device)
    return loaded.eval()


def load_deferred(cfg: ModelConfig, *, device: torch.device | str, seed: int) -> PreTrainedModel:
    """The model of `load_model` for processes that share it: on the meta device, with a weight
    source (`hone.models.deferred`) from which each process reads its shards. A tower is whole, and
    on `device`.

    If the files of a pretrained model do not map directly to its tensors, the model is loaded whole
    into host memory, and the log says why. Raises as `load_model`.
    """
    device = torch.device(device)
    model = _skeleton(cfg, device)
    if cfg.init != "random":
        _require_predicts(model.config, cfg)
    whole = _with_tower(model, cfg, device, seed)
    if cfg.init == "random":
        config = copy.deepcopy(model.config)
        defer(model, _DrawnWeights(config, _options(cfg, device), seed))
    elif whole is not None:
        _say_loading(_place(cfg))
        defer(model, whole.decoder_weights(_computed_buffers(model)))
    elif not _defer_to_files(model, cfg):
        return load_model(cfg, device=device, seed=seed, on_host=True)
    return model


def blank_model(
    cfg: ModelConfig,
    *,
    device: torch.device | str,
    seed: int = 0,
    tp: ModelRanks | None = None,
    packs_rows: bool = False,
) -> PreTrainedModel:
    """The model of `load_model` with zeros as weights, to be filled by a sync, and with its tower,
    unless `device` is meta. With `tp` it has only this rank's parts. Raises as `load_model`.
    """
    device = torch.device(device)
    tp = tp or ModelRanks(device)
    model = _skeleton(cfg, device)
    tp.check_divides(model.config)
    if device.type != "meta":
        _with_tower(model, cfg, device, seed)
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if packs_rows:
        pack_layers(model)
    targets, tensors = dict(model.named_parameters()), dict[str, Tensor]()
    for name, tensor in named.items():
        part = tp.shard_of(name, tensor, model.config)
        part = packed_like(part, targets.get(name))
        tensors[name] = torch.zeros(part.shape, dtype=part.dtype, device=device)
    for name, buffer in _computed_buffers(model).items():
        tensors[name].copy_(buffer)
    return _filled(model, tensors, tp)


def require_attention(cfg: ModelConfig, device: torch.device) -> None:
    """Import the kernels that training's attention will call. Raises UserError if they are
    installed but broken, and as `load_config`."""
    if device.type != "cuda":
        return
    from hone.flash4 import is_installed

    if not is_installed():
        return
    config = load_config(cfg)
    backend = choose_packed_backend(
        device,
        compute_dtype(cfg, device),
        head_dim=head_dim_of(config),
        softcap=getattr(config, "attn_logit_softcapping", None),
    )
    if backend == "flash4":
        from hone.attention import flash4

        flash4.require_importable()


def load_config(cfg: ModelConfig) -> PreTrainedConfig:
    """The checked `config.json` of `cfg.path`; raises as `load_model` does."""
    place = _place(cfg)
    if not Path(place).exists():
        logger.info("%s comes from the Hugging Face hub; a first download may take long", cfg.path)
    config = _config(cfg)
    check_supported(config)
    if config.model_type not in SPECS:
        from hone.models.parity import require_parity

        require_parity(config, trust_remote_code=cfg.trust_remote_code)
    return config


def load_end_ids(cfg: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every id that ends a turn of the model of `cfg`, without loading it (`declared_eos_ids`).
    Raises as `load_config`."""
    declared = None if cfg.init == "random" else _generation_config(cfg)
    return declared_eos_ids(declared, _config(cfg), tokenizer)


def _config(cfg: ModelConfig) -> PreTrainedConfig:
    try:
        held, _ = PreTrainedConfig.get_config_dict(_place(cfg))
        problem = next(impossible_values(held), None)
        if problem is None:
            config = _parsed(cfg)
            if config.model_type not in VISION:
                return config
            from hone.models.vision import text_config_of

            return text_config_of(config)
    except OSError as error:
        raise FileNotFoundError(
            f"model.path={cfg.path!r} holds no usable config.json: {error}"
        ) from error
    except ValueError as error:
        raise UserError(f"model.path={cfg.path!r} is of no known family: {error}") from error
    raise UserError(f"the config.json of model.path={cfg.path!r} {problem}; correct it there")


def _parsed(cfg: ModelConfig) -> PreTrainedConfig:
    """The `config.json` of `cfg.path`, that of the whole model where it has several parts."""
    return AutoConfig.from_pretrained(_place(cfg), trust_remote_code=cfg.trust_remote_code)


def _generation_config(cfg: ModelConfig) -> GenerationConfig | None:
    """The parsed `generation_config.json`, or None."""
    try:
        return GenerationConfig.from_pretrained(_place(cfg))
    except OSError:
        logger.debug("%s has no generation_config.json", cfg.path)
        return None


def _require_predicts(config: PreTrainedConfig, cfg: ModelConfig) -> None:
    """Raise UserError if the weights of `cfg.path` belong to a scoring model. With a tied embedding
    nothing would be missing for a language model, although it was never trained to predict tokens.
    """
    if classifies(config):
        raise UserError(
            f"model.path={cfg.path!r} is {config.architectures}, which scores texts and predicts "
            "no tokens. Name a language model; this one can be reward.model.path, critic.path, or "
            "what `hone reward-model` starts from"
        )


def _place(cfg: ModelConfig) -> str:
    return locate_model(cfg.path, "model.path")


def _options(cfg: ModelConfig, device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        from hone.attention.recurrent.launches import use_found_launches

        use_found_launches(device)  # before transformers imports the package
    return {
        "dtype": compute_dtype(cfg, device),
        "attn_implementation": ATTENTION_NAME,
        "trust_remote_code": cfg.trust_remote_code,
    }


def _empty(auto: Any, config: PreTrainedConfig, options: dict[str, Any]) -> PreTrainedModel:
    """The model of an auto class of transformers, or of hone where that knows none. Called in the
    context of the meta device."""
    if hasattr(config, VISION_FIELD):
        from hone.models.vision_decoders import own_class

        if (kind := own_class(auto, config)) is not None:
            rest = {name: value for name, value in options.items() if name != "trust_remote_code"}
            return kind._from_config(config, **rest)  # pyright: ignore[reportPrivateUsage]
    return auto.from_config(config, **options)


def _skeleton(cfg: ModelConfig, device: torch.device) -> PreTrainedModel:
    """The model of `cfg` for `device` without weights, in eval mode."""
    config = load_config(cfg)
    with torch.device("meta"):
        model = _empty(AutoModelForCausalLM, config, _options(cfg, device))
    if cfg.init != "random":
        declared = _generation_config(cfg)
        if declared is not None:
            model.generation_config = declared
    return model.eval()


def _defer_to_files(model: PreTrainedModel, cfg: ModelConfig) -> bool:
    """Let the tensors of `model`, which are on the meta device, come from the files of `cfg.path`.
    Returns False, and logs the reason, if the files do not map directly to them."""
    try:
        weights = find_weights(_place(cfg), model, _computed_buffers(model))
    except OtherFormatError as error:
        size = sum(p.numel() for p in model.parameters()) * model.dtype.itemsize / 2**30
        logger.warning(
            "The weights of %s can be loaded only whole: %s. Each process takes %.1f GiB of host "
            "memory for them; a folder that hone or save_pretrained wrote is read in parts.",
            cfg.path,
            error,
            size,
        )
        return False
    defer(model, weights)
    _keep_files(model, weights)
    _say_loading(_place(cfg))
    return True


def _keep_files(model: PreTrainedModel, weights: FileWeights) -> None:
    """Let exports of `model` write what the files have besides its tensors, and experts as the
    files have them."""
    keep_unread(model, weights.unread)
    if weights.are_as_in_model:
        setattr(model, _CONVERSIONS, [])


def _say_loading(path: str) -> None:
    """Log that weights are being read, if that takes seconds."""
    size = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
    if size >= _QUICK_BYTES:
        logger.info("loading the weights in %s, %.1f GiB", path, size / 2**30)


def _computed_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """Buffers of a model on the meta device that follow from its config and are not saved. They are
    computed on the CPU, as when transformers loads the model."""
    found: dict[str, Tensor] = {}
    twin = copy.deepcopy(model)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for prefix, module in twin.named_modules():
            own = dict(module.named_buffers(recurse=False))
            if not own:
                continue
            for name, buffer in own.items():
                setattr(module, name, torch.zeros_like(buffer, device="cpu"))
            twin._init_weights(module)  # pyright: ignore[reportPrivateUsage] families override
            found |= {f"{prefix}.{name}": module.get_buffer(name) for name in own}
    saved = model.state_dict()
    return {name: buffer for name, buffer in found.items() if name not in saved}


def _filled(
    model: PreTrainedModel, tensors: Mapping[str, Tensor], tp: ModelRanks
) -> PreTrainedModel:
    """Fill a model on the meta device with these parameters (a tied one under the first of its
    names) and buffers; with several ranks in `tp`, with a rank's parts."""
    made = {
        parameter: nn.Parameter(
            tensors[name], requires_grad=tp.size == 1 and not is_packed(parameter)
        )
        for name, parameter in model.named_parameters()
    }
    for prefix, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, made[parameter])
        for name, _ in list(module.named_buffers(recurse=False)):
            setattr(module, name, tensors[f"{prefix}.{name}"])
    if tp.size > 1:
        tp.fit(model)
    return model


@dataclass(frozen=True, slots=True)
class _DrawnWeights:
    """Weight source of a seed. Every process draws all weights, module by module, and leaves the
    global random state unchanged."""

    config: PreTrainedConfig
    options: dict[str, Any]
    seed: int

    @torch.no_grad()
    def give(self, take: Callable[[Weight], None], *, device: torch.device) -> None:
        with torch.device("meta"):
            model = _empty(AutoModelForCausalLM, self.config, self.options)
        given: set[nn.Parameter] = set()
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(self.seed)
            for prefix, module in model.named_modules():
                own = dict(module.named_parameters(recurse=False))
                if not own or any(parameter not in given for parameter in own.values()):
                    # Modules without weights have rotary frequencies, of which a GPU computes other
                    # bits.
                    module.to_empty(device=device if own else "cpu", recurse=False)
                    model._init_weights(module)  # pyright: ignore[reportPrivateUsage] families override
                    if own:  # some are drawn with the module around, as the routers of Qwen3.5
                        around = model.get_submodule(prefix.rpartition(".")[0])
                        model._init_weights(around)  # pyright: ignore[reportPrivateUsage]
                for name, parameter in own.items():
                    if parameter not in given:  # otherwise it is tied to one that is given
                        take(Weight.of(f"{prefix}.{name}", module.get_parameter(name).detach()))
                        given.add(parameter)
                    setattr(module, name, parameter)
        for name, buffer in model.named_buffers():
            take(Weight.of(name, buffer))


@dataclass(frozen=True, slots=True)
class _BackboneWeights:
    """Weight source of a causal language model without its head, and zeros for a value head."""

    source: WeightSource
    hidden_size: int

    def give(self, take: Callable[[Weight], None], *, device: torch.device) -> None:
        def take_backbone(weight: Weight) -> None:
            if weight.name != "lm_head.weight":
                take(weight)

        self.source.give(take_backbone, device=device)
        take(Weight.of("score.weight", torch.zeros(1, self.hidden_size)))


def _from_files(
    kind: Any, path: str, config: PreTrainedConfig, options: dict[str, Any]
) -> PreTrainedModel:
    _say_loading(path)
    try:
        loaded = kind.from_pretrained(
            path,
            config=config,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below
            **options,
        )
    except OSError as error:
        raise FileNotFoundError(
            f"model.path={path!r} holds no loadable weights: {error} "
            "For untrained weights in this shape set model.init=random"
        ) from error
    except SafetensorError as error:
        raise damaged(path, error) from error
    except RuntimeError as error:
        if "conversion" not in str(error):
            raise
        raise UserError(
            f"model.path={path!r} holds weights that transformers cannot put together: a tensor "
            "of some expert is missing, or has another shape than those of the others"
        ) from error
    model, info = loaded
    if info["missing_keys"]:
        raise lacking(path, list(info["missing_keys"]))
    for name, got, wanted in sorted(info["mismatched_keys"]):
        raise misshapen(path, name, got, wanted)
    if info["unexpected_keys"]:
        raise without_place(path, info["unexpected_keys"])
    keep_unread(model, find_unread(path, model))
    if has_stacked_experts(path, model):  # those of an unread part may not be
        used = getattr(model, _CONVERSIONS)
        setattr(model, _CONVERSIONS, [x for x in used if not isinstance(x, WeightConverter)])
    for name, weight in model.named_parameters():
        require_finite(path, name, weight.detach())
    return model
