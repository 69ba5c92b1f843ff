"""What the walk over all keys runs and looks at: a command as a user calls it, and what it leaves.

Every run takes a fraction of a second: two layers, a few samples, one or two steps, on the CPU and
in this process. What needs a GPU, Ray, vLLM or a tracker is a fake that records what it is handed.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from safetensors.torch import load_file

from hone.cli import command
from hone.cli.main import main
from hone.config.base import Section
from hone.data.arithmetic import ALPHABET, generate, write_jsonl
from hone.hardware import Peaks, gpu_peaks
from hone.models.tiny import make_char_tokenizer, make_tiny_model
from tests.config.row import Row
from tests.config.serve_client import ask_in_thread
from tests.config.trees import WALKED
from tests.tiny_runs import make_classifier, write_inputs

OF_THE_MACHINE = ("time/", "perf/", "mem/", "timestamp_s")
MEASURED = ("engines", "limit", "speedup", "speed", "memory", "device", "steps")
"""What benchmarks measure, which is different every time."""


Seen = dict[str, Any]


def write_walk_inputs(folder: Path) -> None:
    """What the rows name: models, tokenizers, data sets, rewards, templates."""
    write_inputs(folder)
    shape = {"num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16}
    make_tiny_model(
        folder / "other",
        tokenizer=make_char_tokenizer(ALPHABET),
        hidden_size=32,
        intermediate_size=64,
        max_position_embeddings=64,
        seed=5,
        **shape,
    )
    make_tiny_model(
        folder / "gemma",
        tokenizer=make_char_tokenizer(ALPHABET),
        family="gemma2",
        hidden_size=32,
        intermediate_size=64,
        max_position_embeddings=64,
        **shape,
    )
    make_classifier(folder / "judge")
    make_char_tokenizer(ALPHABET).save_pretrained(folder / "tokenizer")
    vocabulary = json.loads((path := folder / "tokenizer" / "tokenizer.json").read_text())
    ids = vocabulary["model"]["vocab"]
    ids |= {f"{digit}": ids[f"{9 - digit}"] for digit in range(10)}
    path.write_text(json.dumps(vocabulary))
    problems = generate(24, seed=3, low=0, high=9)
    (folder / "split").mkdir()
    write_jsonl(folder / "split" / "train.jsonl", problems[:12])
    write_jsonl(folder / "split" / "test.jsonl", problems[12:])
    columns = [
        {
            "prompt": row["prompt"],
            "q": f"9+{n % 10}=",
            "answer": row["answer"],
            "a": "7",
            "task": "x",
        }
        | {
            "kind": f"k{n % 2}",
            "completion": row["answer"],
            "c": "1",
            "level": -n,
            "rate": n % 3 / 2,
        }
        for n, row in enumerate(problems)
    ]
    write_jsonl(folder / "columns.jsonl", columns)
    (folder / "pairs").mkdir()
    pairs = [
        {"prompt": row["prompt"], "chosen": row["answer"], "rejected": f"{9 - n % 9}"}
        for n, row in enumerate(problems)
    ]
    write_jsonl(folder / "pairs" / "train.jsonl", pairs[:12])
    write_jsonl(folder / "pairs" / "test.jsonl", pairs[12:])
    labelled = [
        pair
        | {"q": f"9+{n % 10}=", "completion": "4", "c": "55", "m": 0.5}
        | {"label": n % 2 == 0, "good": n % 3 == 0}
        for n, pair in enumerate(pairs[6:])
    ]
    write_jsonl(folder / "preferred.jsonl", labelled)
    single = ("prompt", "completion", "c", "label", "good")
    write_jsonl(folder / "labelled.jsonl", [{k: row[k] for k in single} for row in labelled])
    holes = [{**row, **pair, "completion": "1"} for row, pair in zip(problems, pairs, strict=True)]
    blank = {**holes[5], **dict.fromkeys(("answer", "completion", "chosen"))}
    write_jsonl(folder / "holes.jsonl", [*holes[:4], *holes[:4], blank])
    (folder / "filters.py").write_text(
        f"def some(row):\n    return row['prompt'] != {holes[0]['prompt']!r}\n"
    )
    (folder / "template.jinja").write_text("{% for m in messages %}1{{ m['content'] }}{% endfor %}")
    (folder / "lengths.jsonl").write_text('{"tokens": 7}\n{"tokens": 99}\n')
    (folder / "requests.jsonl").write_text('{"prompt_tokens": 4, "max_tokens": 3}\n')
    (folder / "envs.py").write_text(
        "class Echo:\n"
        "    def __init__(self, says='+'):\n"
        "        self.says = says\n"
        "    def step(self, episode):\n"
        "        return self.says if len(episode.turns) < 3 else len(episode.turns)\n"
        "class Live:\n"
        "    def start(self, row):\n"
        "        self.is_odd = sum(map(ord, row.prompt)) % 2\n"
        "    def step(self, action):\n"
        "        if self.is_odd: raise ConnectionError('gone')\n"
        "        __import__('time').sleep(0.3)\n"
        "        return '+' if action.index < 2 else action.index\n"
        "    def finish(self):\n"
        "        return 0.5\n"
    )
    with (folder / "rewards.py").open("a") as file:
        file.write(
            "def nine(completion, mark='9'):\n"
            "    return float(mark in completion)\n"
            "def of_lists(completions):\n"
            "    return [float(len(completions))] * len(completions)\n"
            "def told(prompt, answer, task):\n"
            "    return sum(map(ord, f'{prompt}{answer}{task}')) / 1000\n"
            "def slow(completion, answer):\n"
            "    import time\n"
            "    if completion not in ('', answer): time.sleep(0.3)\n"
            "    return 1.0\n"
            "def big(completion, answer):\n"
            "    return float(completion in ('', answer) or len(bytearray(300 << 20)) > 0)\n"
            "def fails(completion, answer):\n"
            "    if completion not in ('', answer): raise ValueError('other')\n"
            "    return 1.0\n"
        )


def observe(inputs: Path, work: Path, command: str, flags: Sequence[str], before: Any) -> Seen:
    """Run a command in an empty folder with the inputs in it; all that it left and said."""
    work.mkdir()
    for path in inputs.iterdir():
        (work / path.name).symlink_to(path)
    here = Path.cwd()
    os.chdir(work)
    try:
        if before is not None:
            _run(command, [*before])
        return _run(command, flags)
    finally:
        os.chdir(here)
        shutil.rmtree(work)


def _run(command: str, flags: Sequence[str]) -> Seen:
    handler = logging.StreamHandler(log := io.StringIO())
    root = logging.getLogger()
    levels = root.level, logging.getLogger("hone").level
    root.addHandler(handler)
    out, err = io.StringIO(), io.StringIO()
    try:
        with (
            Recorder(gpu_peaks("H200") if command.startswith("check") else None) as calls,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            try:
                code: int | str = main([*command.split(), *flags])
            except Stopped:
                code = "stopped"
    finally:
        root.removeHandler(handler)
        root.setLevel(levels[0])
        logging.getLogger("hone").setLevel(levels[1])
    seen: Seen = {"exit": code, "log": log.getvalue() + err.getvalue(), **calls.seen}
    if command.startswith("check"):
        checked = json.loads(out.getvalue())
        return seen | {"findings": checked["findings"], "derived": checked["derived"]}
    return seen | _files(Path())


def _files(folder: Path) -> Seen:
    found = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    seen: Seen = {"files": [str(path) for path in found]}
    for path in found:
        if path.name == "metrics.jsonl":
            seen["metrics"] = [_of_the_run(json.loads(line)) for line in path.open()]
        elif path.name in ("samples.jsonl", "eval_samples.jsonl", "completions.jsonl"):
            seen["samples"] = path.read_text()
        elif path.name.endswith(".trace.json.gz"):
            with gzip.open(path) as file:
                names = [event["name"] for event in json.load(file)["traceEvents"]]
            ranges = [name for name in names if name.startswith("hone/")]
            seen.setdefault("traces", []).append([re.sub(r"\d{9,}", "", path.name), ranges])
        elif path.name == "eval.json":
            seen["scores"] = json.loads(path.read_text())
        elif path.name == "model.safetensors" and "checkpoints" not in path.parts:
            weights = load_file(path)
            seen["dtype"] = str(next(iter(weights.values())).dtype)
            seen["weights"] = blake2b(path.read_bytes()).hexdigest()
        elif path.name in ("bench.json", "bench-train.json", "plan.json"):
            seen["numbers"] = json.loads(path.read_text())
            for name in ("config", *MEASURED):
                seen["numbers"].pop(name, None)
    return seen


def _of_the_run(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not key.startswith(OF_THE_MACHINE)}


class Stopped(Exception):
    """Ends a command once what it hands to a fake is known."""


class Recorder(contextlib.ExitStack):
    """Inside, records what others are handed, and stands for those that are not here.

    transformers' loaders, torch.compile and the objects that hold an engine or a trainer are real;
    `datasets.load_dataset`, Ray and, for `hone check`, an installed GPU are fakes.
    """

    def __init__(self, gpu: Peaks | None) -> None:
        super().__init__()
        self.gpu = gpu
        self.seen: dict[str, list[Any]] = {}

    def __enter__(self) -> Recorder:
        patch = self.enter_context(pytest.MonkeyPatch.context())
        import datasets
        import torch
        import transformers

        from hone.checkpoint.store import CheckpointStore
        from hone.distributed.watch import Watch
        from hone.engine.engine import EmbeddedEngine
        from hone.rewards.scorer import Scorer
        from hone.trainer.parallel_model import ParallelModel
        from hone.trainer.trainer import Trainer

        for loader in (
            transformers.AutoTokenizer,
            transformers.AutoConfig,
            transformers.AutoModelForCausalLM,
        ):
            self._record(patch, loader, "from_pretrained", keys=("trust_remote_code",))
        self._record(patch, torch, "compile", result=lambda function, **_: function)
        for built in (EmbeddedEngine, Trainer, Scorer, Watch, torch.profiler.profile):
            self._record(patch, built, "__init__", name=built.__name__)
        self._record(
            patch, CheckpointStore, "__init__", name="CheckpointStore", keys=("keep_best",)
        )
        self._watch_benchmarks(patch)
        self._ask_server(patch)
        forward, passes = ParallelModel.forward, self.seen.setdefault("passes", [])

        def seen(model: Any, batch: Any, outputs: Any) -> Any:
            passes.append(("backward" if torch.is_grad_enabled() else "forward", batch.num_tokens))
            return forward(model, batch, outputs)

        patch.setattr(ParallelModel, "forward", seen)
        self._record(patch, EmbeddedEngine, "sleep")
        self._record(patch, Trainer, "sleep")
        self._record(patch, datasets, "load_dataset", result=_some_rows)
        self._fake_ray(patch)
        tracker = MagicMock(__spec__=None)
        tracker.__name__ = "wandb"
        patch.setitem(sys.modules, "wandb", tracker)
        self._record(patch, tracker, "init", keys=("project",))
        patch.setattr(command, "local_gpu", lambda: self.gpu)
        if self.gpu is not None:
            patch.setattr(command, "_num_gpus", lambda: None)  # it is not known how many
        return self

    def _ask_server(self, patch: pytest.MonkeyPatch) -> None:
        """A client of `hone serve`, which ends it."""
        import hone.cli.serve as serving
        from hone.door.handover import Handover

        answers = self.seen.setdefault("answers", [])
        patch.setattr(serving, "_print_start", partial(ask_in_thread, seen=answers))
        self._record(patch, Handover, "__init__", name="Handover")

    def _watch_benchmarks(self, patch: pytest.MonkeyPatch) -> None:
        """The models that they load, up to the first one of a public shape, and their requests and
        steps. The machine's own rates are not measured."""
        import hone.tools.bench.bench as of_engine
        import hone.tools.bench.train as of_training

        for module, loader in ((of_engine, "load_model"), (of_training, "load_for_training")):
            load, loaded = getattr(module, loader), self.seen.setdefault("model", [])

            def record(cfg: Any, *args: Any, load: Any = load, loaded: Any = loaded, **kwargs: Any):
                hidden_size = json.loads((Path(cfg.path) / "config.json").read_text())[
                    "hidden_size"
                ]
                loaded.append([_plain(cfg), _plain(kwargs), hidden_size])
                return _stop() if hidden_size > 64 else load(cfg, *args, **kwargs)

            patch.setattr(module, loader, record)
        self._record(patch, of_training, "adapt", name="adapt")
        measure, requests = of_engine.measure, self.seen.setdefault("requests", [])

        def measured(engine: Any, those: Sequence[Any], **kwargs: Any) -> Any:
            requests.append([(list(x.prompt_ids), x.sampling.max_tokens) for x in those])
            return measure(engine, those, **kwargs)

        patch.setattr(of_engine, "measure", measured)
        step, steps = of_training._Probe.step, self.seen.setdefault("steps", [])

        def stepped(probe: Any, update: Any) -> Any:
            result = step(probe, update)
            steps.append((probe.num_passes, probe.most_tokens, probe.most_trained))
            return result

        patch.setattr(of_training._Probe, "step", stepped)
        for module, peaks in ((of_engine, "device_peaks"), (of_training, "measure_peaks")):
            patch.setattr(module, peaks, lambda *_: Peaks("CPU", 1e10, 1e10, "measured"))

    def _fake_ray(self, patch: pytest.MonkeyPatch) -> None:
        """What a run with engines apart builds, up to its rollout, on a Ray that does nothing."""
        import hone.distributed.ray as on_ray
        from hone.loops import reinforce, workers

        for name in ("ray", "placement_group", "remove_placement_group", "RayWorker"):
            patch.setattr(on_ray, name, MagicMock())
        patch.setattr(on_ray, "own_node", lambda: {"Alive": True})
        self._record(patch, workers, "EnginePool", name="EnginePool", result=MagicMock())
        self._record(patch, reinforce, "BroadcastSync", name="BroadcastSync", result=MagicMock())
        self._record(patch, reinforce, "Collector", name="Collector")
        collector = reinforce.Rank0Collector

        def collector_or_end(teams: Any, own: Any, weights: Any = None) -> Any:
            return _stop() if weights is not None else collector(teams, own)

        self._record(patch, reinforce, "Rank0Collector", result=collector_or_end)

    def _record(
        self,
        patch: pytest.MonkeyPatch,
        owner: Any,
        attribute: str,
        *,
        name: str | None = None,
        keys: Sequence[str] | None = None,
        result: Any = None,
    ) -> None:
        original = getattr(owner, attribute)
        calls = self.seen.setdefault(name or f"{owner.__name__}.{attribute}", [])

        def record(*args: Any, **kwargs: Any) -> Any:
            shown = {key: kwargs.get(key) for key in keys} if keys else (args, kwargs)
            calls.append(_plain(shown))
            return (result or original)(*args, **kwargs)

        patch.setattr(owner, attribute, record)


def _some_rows(*_: Any, **__: Any) -> Any:
    import datasets

    rows = [json.loads(line) for line in Path("train.jsonl").read_text().splitlines()]
    rows = [row | {"chosen": row["answer"], "rejected": "5"} for row in rows]
    return datasets.Dataset.from_list(rows)


def _stop(*_: Any, **__: Any) -> None:
    raise Stopped


def _plain(value: Any) -> Any:
    """Configurations and numbers as they are, other objects by their type."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Section():
            return value.model_dump(mode="json")
        case dict():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case _:
            return type(value).__name__


def both(tree: str, key: str, row: Row) -> list[tuple[str, tuple[str, ...], Any]]:
    """The two runs of a row: command, flags, flags of the run before. The second has the key."""
    command = row.command or tree
    common = ["--json"] if command.startswith("check") else []
    base = [*WALKED[tree].smallest, *row.given]
    if any(flag.startswith("--model.path") for flag in row.given):
        base = [flag for flag in base if not flag.startswith("--model.shape")]
    named = {flag.partition("=")[0] for flag in base}
    if "--model.path" not in named and "--model.shape" not in named:
        common.append("--model.path=model")
    if "--run.device" not in named and tree != "plan":
        common.append("--run.device=cpu")
    flags = (*common, *base)
    before = None if row.before is None else (*common, *WALKED[tree].smallest, *row.before)
    changed = row.flag or f"--{key}={row.value}"
    return [(command, flags, before), (command, (*flags, changed), before)]
