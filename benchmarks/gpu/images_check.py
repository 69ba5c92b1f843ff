"""Images on one GPU: parity of all families, and where a step's time goes.

    python -m benchmarks.gpu.images_check [SECTION ...] [--shape qwen3-vl-2b] [--seconds N]

Sections:

    step     whole GRPO steps of a Qwen3-VL: 32 prompts of 64 tokens of text and an image of 512,
             eight samples of 512 tokens each; seconds by phase, share of the limit (`R_step`)
    decode   the same lengths with a Qwen3 of the same size: prompts of text
    tower    towers alone, and the share of the matrix rate
    tiny     engine against trainer, for a small model of each family
    public   the same in the shapes of public models

Weights are random. Images are JPEG files in memory.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import torch
from benchmarks.gpu.sections import Run
from PIL import Image
from transformers import AutoConfig, PreTrainedModel

from hone.algorithms.objective import PolicyObjective
from hone.algorithms.settings import AlgorithmConfig
from hone.engine.engine import EmbeddedEngine
from hone.engine.settings import EngineConfig
from hone.families.shape import ModelShape
from hone.families.spec import Json
from hone.families.vision.registry import VISION
from hone.families.vision.spec import ImageSettings
from hone.hardware import Peaks
from hone.images.opening import open_image
from hone.images.pixels import TileSource, content_hash, layout_of
from hone.images.pool import PixelPool
from hone.images.store import STORE
from hone.model_input import TEXT, Content, ModelInput
from hone.models.contents import require_features
from hone.models.decoder import alias_module
from hone.models.fused_layers import FusedDecoder
from hone.models.load import load_model
from hone.models.settings import ModelConfig
from hone.models.tiny_vision import make_tiny_vision_model
from hone.planner.roofline import decode_step_s, generation_time_s, training_flops
from hone.trainer.prefixes import left_out, shared_prefixes
from hone.trainer.settings import TrainerConfig
from hone.trainer.trainer import Trainer
from hone.types import Column, Completion, Request, Row, SamplingParams
from hone.weights.sync import WeightSync

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
PEAKS = Peaks(name="H200", bytes_per_s=4.3e12, flops_per_s=790e12, source="measured")
PROMPTS, SAMPLES, TEXT_TOKENS, COMPLETION = (32, 8, 64, 512) if ON_GPU else (2, 2, 5, 6)
IMAGE_SIZE = 512, 1024
"""Height and width in pixels: 512 tokens of Qwen3-VL."""
MAX_K3, MAX_OUTSIDE = 2e-3, 0.08
PUBLIC = ("qwen3-vl-2b", "qwen2.5-vl-3b", "smolvlm2-2.2b", "gemma-3-4b")
IMAGE_TOKENS = 512 if ON_GPU else 64


@dataclass
class Model:
    """A decoder with its tower, and how its images are processed."""

    decoder: PreTrainedModel
    settings: ImageSettings
    config: Json

    @classmethod
    def load(cls, folder: str, config: Json) -> Model:
        decoder = load_model(ModelConfig(path=folder, init="random"), device=DEVICE, seed=0)
        if config["model_type"] == "gemma3":  # which transformers draws as zeros
            projector: Any = require_features(decoder).tower.modules["multi_modal_projector"]
            projector.mm_input_projection_weight.normal_(std=0.02)
        ids = {v: k for k, v in config.items() if k.endswith(("_token_id", "_token_index"))}
        tokens = {f"<{name}>": number for number, name in ids.items() if number is not None}
        tokens |= {"<fake_token_around_image>": -1, "<global-img>": -2}
        spec = VISION[config["model_type"]]
        processor: Json = {"size": {"longest_edge": 4 * 384}} if "scale_factor" in config else {}
        most = IMAGE_TOKENS if config["model_type"] != "gemma3" else None
        settings = spec.settings(config, processor, max_tokens=most, tokens=tokens)
        return cls(decoder, settings, config)

    @classmethod
    def of_public(cls, name: str) -> Model:
        config = next(spec.public[name] for spec in VISION.values() if name in spec.public)
        with TemporaryDirectory() as folder:
            fields = {k: v for k, v in config.items() if k != "model_type"}
            AutoConfig.for_model(config["model_type"], **fields).save_pretrained(folder)
            return cls.load(folder, config)

    @classmethod
    def tiny(cls, family: str) -> Model:
        sizes = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512}
        with TemporaryDirectory() as folder:
            make_tiny_vision_model(folder, family=family, **sizes)
            return cls.load(folder, AutoConfig.from_pretrained(folder).to_dict())

    def sequence(
        self, draw: np.random.Generator, num_text: int, sizes: Sequence[tuple[int, int]]
    ) -> tuple[tuple[int, ...], ModelInput]:
        """Ids of random text with new random images of these heights and widths before its last
        half."""
        highest = min(self.decoder.config.vocab_size, 30_000) - 100
        text = draw.integers(1, min(highest, 90), num_text).tolist()
        ids, contents = text[: num_text // 2], list[Content]()
        for height, width in sizes:
            blocks = draw.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
            buffer = BytesIO()
            Image.fromarray(blocks.repeat(9, 0).repeat(9, 1)).save(buffer, "JPEG", quality=90)
            file = open_image(buffer.getvalue(), folder=None)
            for number, tile in enumerate(layout_of(file, self.settings).tiles):
                name = content_hash(file.digest, self.settings, number)
                STORE.register({name: TileSource(file, self.settings, number)})
                contents.append(
                    Content(
                        kind="image",
                        hash=name,
                        start=len(ids),
                        num_tokens=tile.num_tokens,
                        shape=tile.shape,
                    )
                )
                ids += [self.settings.placeholder_id] * tile.num_tokens + [7]
        found = (*ids, *text[num_text // 2 :])
        return found, ModelInput(tuple(contents)) if contents else TEXT


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


class Clock:
    """Seconds of phases; a phase inside another counts for itself alone."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inner = [0.0]

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        synchronize()
        start = perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            synchronize()
            whole = perf_counter() - start
            self.seconds[name] += whole - self._inner.pop()
            self._inner[-1] += whole

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            with self.phase(name):
                return function(*arguments)

        return call


# -- a whole step ----------------------------------------------------------------------------------


def groups(
    model: PreTrainedModel, prompts: Sequence[tuple[tuple[int, ...], ModelInput]], tag: str
) -> list[Request]:
    return [
        Request(
            id=f"{tag}/{number}/{sample}",
            prompt_ids=ids,
            model_input=model_input,
            sampling=SamplingParams(
                max_tokens=COMPLETION, seed=SAMPLES * number + sample, ignore_eos=True
            ),
        )
        for number, (ids, model_input) in enumerate(prompts)
        for sample in range(SAMPLES)
    ]


def rollout(
    engine: EmbeddedEngine, requests: list[Request], clock: Clock
) -> tuple[list[Completion], list[float]]:
    """Completions, and the seconds of each step that only decodes."""
    first = engine.stats().num_first_tokens + len(requests)
    done: list[Completion] = []
    steps: list[float] = []
    with clock.phase("prefill"):
        engine.submit(requests)
        while engine.has_unfinished and engine.stats().num_first_tokens < first:
            done += engine.step()
    with clock.phase("decode"):
        while engine.has_unfinished:
            start = perf_counter()
            done += engine.step()
            steps.append(perf_counter() - start)
    return done, steps


def make_trainer(model: PreTrainedModel, **settings: Any) -> Trainer:
    return Trainer(
        model,
        TrainerConfig(**settings),
        PolicyObjective(AlgorithmConfig(), max_completion_tokens=COMPLETION),
        total_steps=10,
    )


def rows_of(requests: Sequence[Request], done: Sequence[Completion]) -> list[Row]:
    found = {each.request_id: each for each in done}
    draw = torch.Generator().manual_seed(0)
    rows: list[Row] = []
    for request in requests:
        completion = found[request.id]
        number = len(completion.token_ids)
        advantage = torch.randn(1, generator=draw).expand(number).clone()
        rows.append(
            Row(
                id=request.id,
                group_id=request.id.rpartition("/")[0],
                token_ids=[*request.prompt_ids, *completion.token_ids],
                loss_mask=[False] * len(request.prompt_ids) + [True] * number,
                model_input=request.model_input,
                columns={
                    "logprobs/engine": Column(torch.tensor(completion.logprobs).float()),
                    "advantages": Column(advantage),
                },
            )
        )
    return rows


def limits(shape: ModelShape, requests: Sequence[Request], rows: Sequence[Row]) -> dict[str, float]:
    """The shortest seconds of generation and of training, from the actual lengths."""
    lengths = [len(request.prompt_ids) for request in requests]
    generate = generation_time_s(
        shape,
        PEAKS,
        lengths,
        [COMPLETION] * len(requests),
        max_num_seqs=len(requests),
        prefill_lengths=lengths[::SAMPLES],
    )
    prefill = generation_time_s(
        shape,
        PEAKS,
        lengths,
        [1] * len(requests),
        max_num_seqs=1,
        prefill_lengths=lengths[::SAMPLES],
    )
    flops = training_flops(
        shape,
        [row.num_tokens for row in rows],
        num_head_tokens=sum(row.num_trained for row in rows),
    )
    shared = left_out(rows, shared_prefixes(rows))
    flops -= training_flops(shape, shared, num_head_tokens=0)
    training = flops / PEAKS.flops_per_s
    return {"prefill": prefill, "decode": generate - prefill, "training": training}


def step(run: Run, name: str) -> None:
    model = Model.of_public(name) if ON_GPU else Model.tiny("qwen3_vl")
    decoder = model.decoder
    source = require_features(decoder)
    pool = PixelPool(run.args.workers)
    STORE.use(pool)
    clock = Clock()
    source._pixels_of = clock.timed("pixels", source._pixels_of)
    source.tower.encode = clock.timed("tower", source.tower.encode)  # type: ignore[method-assign]
    trainer = make_trainer(
        decoder, max_tokens_per_microbatch=run.args.tokens, recompute=run.args.recompute
    )
    engine = EmbeddedEngine(
        alias_module(decoder),
        EngineConfig(max_num_seqs=256, kv_cache_gib=run.args.cache if ON_GPU else 0.1),
        eos_token_ids=(),
        max_model_len=2 * COMPLETION + TEXT_TOKENS + 100,
    )
    run.check("the engine is fused", isinstance(engine._runner.model._backbone, FusedDecoder))
    sync = WeightSync(trainer, engine)
    sync.push(1)
    shape = ModelShape.from_config(decoder.config.to_dict())
    draw = np.random.default_rng(0)
    size = IMAGE_SIZE if ON_GPU else (64, 96)
    cost = VISION[model.settings.family].tower_cost(model.config)
    for number in range(run.args.steps):
        clock.seconds.clear()
        prompts = [model.sequence(draw, TEXT_TOKENS, [size]) for _ in range(PROMPTS)]
        num_images, num_patches = source.num_encoded, source.num_patches
        with clock.phase("rest"):
            requests = groups(decoder, prompts, f"{number}")
            done, steps = rollout(engine, requests, clock)
            rows = rows_of(requests, done)
            with clock.phase("training"):
                metrics = trainer.update(rows)
            with clock.phase("sync"):
                sync.push(number + 2)
        encoded, patches = source.num_encoded - num_images, source.num_patches - num_patches
        run.check(f"step {number}: an image is encoded once", encoded == PROMPTS, encoded)
        if number == 0:
            run.note("first step, with compilation", sum(clock.seconds.values()))
            continue
        limit = limits(shape, requests, rows)
        limit["tower"] = cost.flops(patches / encoded) * encoded / PEAKS.flops_per_s
        report_step(run, f"step {number}", clock, limit, metrics)
        context = TEXT_TOKENS + IMAGE_TOKENS + COMPLETION / 2
        batch = PROMPTS * SAMPLES
        least = float(decode_step_s(shape, PEAKS, batch, batch * context))
        run.row(f"step {number}: decode step ms, limit ms", 1e3 * median(steps), 1e3 * least)
    if ON_GPU:
        run.row("peak GiB", torch.cuda.max_memory_allocated() / 2**30)
    STORE.use(None)
    pool.close()


def report_step(
    run: Run, name: str, clock: Clock, limit: Mapping[str, float], metrics: Mapping[str, Any]
) -> None:
    whole = sum(clock.seconds.values())
    run.row(name, "s", "share", "limit s", "limit/s")
    for phase in ("pixels", "tower", "prefill", "decode", "training", "sync", "rest"):
        seconds, least = clock.seconds[phase], limit.get(phase, 0.0)
        run.row(f"  {phase}", seconds, seconds / whole, least, least / max(seconds, 1e-9))
    all_limits = sum(limit.values())
    r_step = all_limits / whole
    run.check(f"  whole step, R_step >= {run.args.least}", r_step >= run.args.least, whole, r_step)
    mismatch = metrics["off_policy/mismatch_kl"]
    run.row("  k3 KL between engine and trainer", float(mismatch.sum / mismatch.count))


def decode(run: Run, name: str) -> None:
    """A Qwen3 with the sizes of the decoder."""
    public = next(spec.public[name] for spec in VISION.values() if name in spec.public)
    fields = {k: v for k, v in public["text_config"].items() if k != "model_type"}
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e6}
    with TemporaryDirectory() as folder:
        AutoConfig.for_model("qwen3", **fields).save_pretrained(folder)
        model = load_model(ModelConfig(path=folder, init="random"), device=DEVICE, seed=0)
    engine = EmbeddedEngine(
        model,
        EngineConfig(max_num_seqs=256, kv_cache_gib=run.args.cache),
        eos_token_ids=(),
        max_model_len=2 * COMPLETION + TEXT_TOKENS + 100,
    )
    draw = np.random.default_rng(0)
    for number in range(2):
        clock = Clock()
        num_tokens = TEXT_TOKENS + IMAGE_TOKENS + 1
        prompts = [
            (tuple(draw.integers(1, 30_000, num_tokens).tolist()), TEXT) for _ in range(PROMPTS)
        ]
        _, steps = rollout(engine, groups(model, prompts, f"{number}"), clock)
    run.row(
        "Qwen3 of text: decode step ms, prefill s", 1e3 * median(steps), clock.seconds["prefill"]
    )
    run.row("Qwen3 of text: decode s", clock.seconds["decode"])


# -- towers ----------------------------------------------------------------------------------------


def tower(run: Run) -> None:
    run.row("towers, 16 images", "tokens", "patches", "ms", "TFLOP/s", "of 790", "host ms")
    for name in PUBLIC:
        with run.attempt(name):
            one_tower(run, name)


def one_tower(run: Run, name: str) -> None:
    model = Model.of_public(name)
    source = require_features(model.decoder)
    model.decoder.to("meta")
    draw = np.random.default_rng(0)
    contents = [model.sequence(draw, 4, [IMAGE_SIZE])[1].contents for _ in range(16)]
    tiles = STORE.pixels([each.hash for some in contents for each in some])
    for _ in range(2):
        source.tower.encode(tiles)
    times: list[float] = []
    hosts: list[float] = []
    for _ in range(5):
        synchronize()
        start = perf_counter()
        source.tower.encode(tiles)
        hosts.append(perf_counter() - start)
        synchronize()
        times.append(perf_counter() - start)
    cost = VISION[model.settings.family].tower_cost(model.config)
    flops = sum(cost.flops(tile.num_patches) for tile in tiles)
    rate = flops / median(times)
    run.row(
        f"  {name}",
        sum(each.num_tokens for some in contents for each in some),
        sum(tile.num_patches for tile in tiles),
        *(1e3 * median(times), rate / 1e12, rate / PEAKS.flops_per_s, 1e3 * median(hosts)),
    )


# -- parity ----------------------------------------------------------------------------------------


def images_of(request: Request) -> int:
    return int(request.id.partition("/")[0]) % 3


def parity(run: Run, name: str, model: Model, **options: Any) -> None:
    """Prompts with no, one and two images, in chunks that end inside images."""
    start = perf_counter()
    decoder = model.decoder
    trainer = make_trainer(decoder, compile=False)
    engine = EmbeddedEngine(
        alias_module(decoder),
        EngineConfig(max_num_seqs=32, max_num_batched_tokens=1000, kv_cache_gib=4, **options),
        eos_token_ids=(),
        max_model_len=2000,
    )
    draw = np.random.default_rng(1)
    sizes = [(), (IMAGE_SIZE,), ((256, 384), (256, 384))]
    prompts = [model.sequence(draw, 48, sizes[number % 3]) for number in range(8)]
    requests = [
        Request(
            id=f"{number}/{sample}",
            prompt_ids=ids,
            model_input=model_input,
            sampling=SamplingParams(max_tokens=96, seed=4 * number + sample, ignore_eos=True),
        )
        for number, (ids, model_input) in enumerate(prompts)
        for sample in range(4)
    ]
    done, _ = rollout(engine, requests, Clock())
    rows = rows_of(requests, done)
    gaps = [
        (found - row.column("logprobs/engine")).double()
        for row, found in zip(rows, trainer.logprobs(rows), strict=True)
    ]
    for images in range(3):
        some = torch.cat(
            [gap for r, gap in zip(requests, gaps, strict=True) if images_of(r) == images]
        )
        run.note(f"  {name}, {images} images: k3 KL", (some.exp() - 1 - some).mean().item())
    ratios = torch.cat(gaps).exp()
    k3 = (ratios - 1 - ratios.log()).mean().item()
    outside = ((ratios < 0.9) | (ratios > 1.1)).double().mean().item()
    run.check(
        f"  {name}",
        k3 <= MAX_K3 and outside <= MAX_OUTSIDE,
        *(k3, f"{outside:.2%}"),
        "fused" if isinstance(engine._runner.model._backbone, FusedDecoder) else "transformers",
        perf_counter() - start,
    )


def tiny(run: Run) -> None:
    run.row("tiny models", "k3 KL", "ratios out", "layers", "s")
    for family in VISION:
        with run.attempt(family):
            parity(run, family, Model.tiny(family), enforce_eager=family == "gemma3")


def public(run: Run) -> None:
    run.row("public shapes", "k3 KL", "ratios out", "layers", "s")
    for name in PUBLIC:
        if run.has_time(name):
            with run.attempt(name):
                model = Model.of_public(name)
                parity(run, name, model, enforce_eager=name.startswith("gemma"))


def main() -> None:
    def add_flags(parser: Any) -> None:
        parser.add_argument("--shape", default="qwen3-vl-2b")
        parser.add_argument("--steps", type=int, default=3)
        parser.add_argument("--tokens", type=int, default=16_384, help="of a micro-batch")
        parser.add_argument("--recompute", default="off")
        parser.add_argument("--cache", type=float, default=36, help="GiB of keys and values")
        parser.add_argument("--workers", type=int, default=8, help="that decode images")
        parser.add_argument("--least", type=float, default=0.6, help="of R_step")

    names = ("step", "decode", "tower", "tiny", "public")
    run = Run(__doc__, names, seconds=330, add_flags=add_flags)
    if ON_GPU:
        run.row(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    sections = {
        "step": lambda: step(run, run.args.shape),
        "decode": lambda: decode(run, run.args.shape),
        "tower": lambda: tower(run),
        "tiny": lambda: tiny(run),
        "public": lambda: public(run),
    }
    sys.exit(run.go(sections))


if __name__ == "__main__":
    main()
