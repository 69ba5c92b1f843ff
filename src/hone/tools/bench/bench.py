"""`hone bench engine`: runs a workload through the engine and, on request, through vLLM."""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from hone.config.bench import BenchModelConfig
from hone.config.tree import BenchEngineConfig
from hone.engine.engine import EmbeddedEngine, make_cache
from hone.engine.kv_cache import cache_dtype
from hone.extras import is_installed
from hone.families.registry import spec_of
from hone.families.shape import ModelShape
from hone.families.vision.registry import VISION, decoder_config
from hone.hardware import Peaks
from hone.loops.launch import choose_device
from hone.models.load import compute_dtype, load_config, load_model
from hone.models.settings import ModelConfig
from hone.models.support import context_length, eos_token_ids
from hone.models.tensor_parallel import TensorParallel, divide_config
from hone.models.tiny import make_model_folder
from hone.observe.peaks import device_peaks
from hone.tools.bench.measure import EngineRun, measure
from hone.tools.bench.summary import Limits, Summary, summarise
from hone.tools.bench.vllm_runner import run_vllm
from hone.tools.bench.workloads import Workload, make_workload
from hone.version import __version__

__all__ = ["BenchResult", "bench_engine", "model_folder", "vllm_model"]

_log = logging.getLogger(__name__)
PROGRESS_S = 10.0
"""Seconds between two progress lines."""


@dataclass(frozen=True, slots=True)
class BenchResult:
    """Result of `hone bench engine`: hone's engine first, then the one it is compared with."""

    cfg: BenchEngineConfig
    workload: Workload
    limits: Limits
    runs: tuple[EngineRun, ...]

    @property
    def summaries(self) -> dict[str, Summary]:
        return {run.name: summarise(run, self.workload, self.limits) for run in self.runs}

    @property
    def model_name(self) -> str:
        return self.cfg.model.shape or str(self.cfg.model.path)


def bench_engine(cfg: BenchEngineConfig) -> BenchResult:
    """Draw the requests, check that they fit, run them.

    vLLM runs first and is gone when hone's engine starts, so that each has the device to itself.
    Raises UserError or ValueError, before anything runs, if the model cannot be served or a request
    or the KV cache does not fit.
    """
    device = choose_device(cfg.run)
    tp = TensorParallel.from_environment(cfg.engine.tensor_parallel_size, device)
    with model_folder(cfg.model) as folder:
        init = cfg.model.init if cfg.model.shape is None else "random"
        model_cfg = ModelConfig(
            path=folder, init=init, dtype=cfg.model.dtype, exact=cfg.model.exact
        )
        config = load_config(model_cfg)
        vocab_size = int(config.vocab_size)
        workload = make_workload(cfg, vocab_size)
        workload.check_fits(context_length(config), limit="the model's context length")
        warmup = workload.redrawn(cfg.run.seed + 1, vocab_size)
        dtype = compute_dtype(model_cfg, device)
        shape = ModelShape.from_config(config.to_dict())
        divide_config(config, tp.size)
        make_cache(
            config,
            cfg.engine,
            device=device,
            dtype=dtype,
            max_model_len=workload.longest,
            resident_bytes=shape.rank_bytes(
                tp.size, dtype.itemsize, packs_rows=cfg.engine.packs_rows
            ),
        )
        others: list[EngineRun] = []
        if cfg.against is not None:
            log = cfg.output.with_suffix(".vllm.log")
            _log.info("vLLM runs first; it logs to %s", log)
            options = _vllm_options(cfg, model_cfg, workload, dtype)
            others.append(
                run_vllm(options, warmup=warmup.requests, requests=workload.requests, log=log)
            )
        limits = Limits(
            shape=shape,
            peaks=_together(device_peaks(device, dtype), cfg.engine.tensor_parallel_size),
            bytes_per_value=dtype.itemsize,
            kv_bytes_per_value=cache_dtype(cfg.engine, dtype).itemsize,
            packs_rows=cfg.engine.packs_rows,
            max_num_seqs=cfg.engine.max_num_seqs,
            shares_prompts=cfg.engine.enable_prefix_caching,
        )
        ours = _run_hone(cfg, model_cfg, tp, warmup, workload)
    if tp.size > 1:  # a rank that exits with open connections may abort the others, or itself
        dist.destroy_process_group()
    return BenchResult(cfg, workload, limits, (ours, *others))


def _run_hone(
    cfg: BenchEngineConfig,
    model_cfg: ModelConfig,
    tp: TensorParallel,
    warmup: Workload,
    workload: Workload,
) -> EngineRun:
    start_s = time.perf_counter()
    making = "drawing random weights" if model_cfg.init == "random" else "loading weights"
    _log.info("%s of %s", making, cfg.model.shape or cfg.model.path)
    model = load_model(
        model_cfg, device=tp.device, seed=cfg.run.seed, tp=tp, packs_rows=cfg.engine.packs_rows
    )
    _log.info("making the engine")
    engine = EmbeddedEngine(
        model,
        cfg.engine,
        eos_token_ids=eos_token_ids(model, None),
        max_model_len=workload.longest,
        owns_weights=True,
        tensor_parallel=tp,
        exact=model_cfg.exact,
    )
    started_s = time.perf_counter()
    _log.info("warming up on %d requests", len(warmup.requests))
    measure(engine, warmup.requests, progress=_progress("warming up", warmup))
    warm_s = time.perf_counter()
    _log.info("measuring %d requests", len(workload.requests))
    return EngineRun(
        name="hone",
        version=__version__,
        start_s=started_s - start_s,
        warmup_s=warm_s - started_s,
        measured=measure(engine, workload.requests, progress=_progress("measuring", workload)),
    )


def _progress(doing: str, workload: Workload) -> Callable[[int], None]:
    """Progress callback that logs every `PROGRESS_S` seconds how many of all tokens are sampled."""
    start_s = last_s = time.perf_counter()

    def report(num_tokens: int) -> None:
        nonlocal last_s
        now_s = time.perf_counter()
        if now_s - last_s >= PROGRESS_S:
            last_s = now_s
            total, seconds = workload.num_output_tokens, now_s - start_s
            _log.info("%s: %d of %d tokens after %.0f s", doing, num_tokens, total, seconds)

    return report


def _together(peaks: Peaks, num_devices: int) -> Peaks:
    """Combined peaks of devices that share one model."""
    if num_devices == 1:
        return peaks
    return replace(
        peaks,
        name=f"{num_devices} x {peaks.name}",
        bytes_per_s=num_devices * peaks.bytes_per_s,
        flops_per_s=num_devices * peaks.flops_per_s,
    )


def _vllm_options(
    cfg: BenchEngineConfig, model_cfg: ModelConfig, workload: Workload, dtype: torch.dtype
) -> dict[str, Any]:
    """Options of vLLM for the same model, formats, memory, concurrency and prefix caching. The rest
    is vLLM's default, above all its token budget per step, which vLLM chooses by the device."""
    options: dict[str, Any] = {
        **vllm_model(cfg.model.shape, Path(model_cfg.path)),
        "runner": "generate",
        "load_format": "dummy" if model_cfg.init == "random" else "auto",
        "skip_tokenizer_init": True,
        "dtype": str(dtype).removeprefix("torch."),
        "kv_cache_dtype": cfg.engine.kv_cache_dtype,
        "max_model_len": workload.longest,
        "max_num_seqs": cfg.engine.max_num_seqs,
        "gpu_memory_utilization": cfg.engine.gpu_memory_utilization,
        "enable_prefix_caching": cfg.engine.enable_prefix_caching,
        "seed": cfg.run.seed,
    }
    if cfg.engine.kv_cache_gib is not None:
        options["kv_cache_memory_bytes"] = int(cfg.engine.kv_cache_gib * 2**30)
    return options


def vllm_model(shape: str | None, folder: Path) -> dict[str, Any]:
    """Options of vLLM that depend on the model, with its folder. Hybrids are published with a tower
    for images, and vLLM serves them in that form alone; requests are text, so it does not load the
    tower. On Hopper GPUs it reads prompts of hybrids with FlashInfer, also where that is missing.
    """
    published = {name: whole for spec in VISION.values() for name, whole in spec.public.items()}
    if shape in published:
        whole = published[shape]
        folder = folder / "published"
        folder.mkdir()
        kind = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[whole["model_type"]]
        (folder / "config.json").write_text(json.dumps({**whole, "architectures": [kind]}))
    options: dict[str, Any] = {"model": str(folder)}
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] in VISION:
        options["language_model_only"] = True
    is_hybrid = spec_of(str(decoder_config(config)["model_type"])).is_hybrid
    if is_hybrid and not is_installed("flashinfer"):
        options["gdn_prefill_backend"] = "triton"
    return options


@contextmanager
def model_folder(model: BenchModelConfig) -> Generator[str]:
    """Context manager of the model's folder. For a public shape it is a temporary one."""
    if model.shape is None:
        assert model.path is not None, f"{model=}"
        yield model.path
        return
    with tempfile.TemporaryDirectory() as folder:
        make_model_folder(Path(folder), model.shape)
        yield folder
