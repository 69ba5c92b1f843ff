"""Whole runs by two source trees, compared bit for bit.

    git archive 4944ed9 | tar -x -C /tmp/before
    python -m benchmarks.bitwise_versions /tmp/before . [mode ...]

Each mode is a run on a CPU with one thread, made by both trees from the same model and data.
Weights are compared byte for byte, samples and metrics value for value, without what follows from
time. The table says `equal` or names the first value that differs; the exit code is 1 where one
does. Name one tree twice to see that a mode repeats itself.

An asynchronous run depends on time: how fast training is decides which weights sample a token. Its
modes therefore run in *stepped* time (`_step_by_commands`): the engine's thread makes a step where
the collector asks for one and at no other time, a poll of the scorer waits for all scores, and
sampling makes `POLLS_PER_UPDATE` steps for each update. But for these waits the code of the trees
is as it stands. The run is interrupted by SIGTERM and goes on in a second process.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

POLLS_PER_UPDATE = 5
INTERRUPTED_IN_STEP = 3
TERMINATED = 128 + signal.SIGTERM
OF_TIME = ("time/", "perf/", "mem/", "timestamp_s")

Tree = dict[str, dict[str, Any]]

_TRAINER = {"optimizer": {"lr": 3e-3}, "logits_chunk_tokens": 64}
_BASE: Tree = {
    "run": {"dir": "run", "steps": 3, "device": "cpu"},
    "model": {"path": "model"},
    "data": {
        "train": [{"path": "train.jsonl"}],
        "eval": [{"path": "eval.jsonl"}],
        "chat": "never",
        "max_prompt_tokens": 8,
    },
    "rollout": {"prompts_per_step": 4, "n_samples_per_prompt": 4, "max_completion_tokens": 8},
    "engine": {"max_num_seqs": 16},
    "reward": {"functions": [{"fn": "rewards.py:even"}], "num_workers": 1},
    "trainer": _TRAINER,
    "eval": {"every_n_steps": 2, "n_samples_per_prompt": 2, "max_completion_tokens": 8},
    "log": {"to": [], "samples_per_step": 99},
}
_AHEAD: Tree = {
    "run": {"steps": 7},
    "pipeline": {"max_staleness": 2},
    "algorithm": {"correction": {"kind": "tis"}},
    "rollout": {"max_completion_tokens": 24},
    "eval": {"every_n_steps": 3, "max_completion_tokens": 24},
    "checkpoint": {"every_n_steps": 2},
}
MODES: dict[str, tuple[Tree, tuple[str, ...]]] = {
    "data parallel": (
        {
            "rollout": {"dynamic_sampling": True},
            "trainer": {"prompts_per_minibatch": 2},
            "algorithm": {"kl": {"coef": 0.01}},
        },
        ("--nproc", "2"),
    ),
    "tensor-parallel engine": (
        {
            "rollout": {"oversample_prompts": 2},
            "engine": {"tensor_parallel_size": 2, "enable_sleep": True},
            "trainer": {"enable_sleep": True, "parallel": {"zero_stage": 3}},
        },
        ("--nproc", "2"),
    ),
    "remote critic": (
        {
            "algorithm": {"advantage": "gae", "lam": 0.9},
            "trainer": {"prompts_per_minibatch": 2, "num_epochs": 2},
            "critic": {"lr": 1e-3, "max_tokens_per_microbatch": 40},
            "cluster": {"num_critics": 1},
        },
        (),
    ),
    "asynchronous": (_AHEAD, ()),
    "asynchronous, aborted": (
        _AHEAD | {"pipeline": {"max_staleness": 2, "in_flight": "abort"}},
        (),
    ),
}
"""Sections over `_BASE`, and flags of `hone rl`."""


def compare(before: Path, after: Path) -> str:
    """`equal` and how much was compared, or the first value that differs between two folders."""
    from safetensors.torch import load_file

    num_tensors = num_values = 0
    files = sorted(before.glob("*/*.safetensors"))
    assert files, f"no weights in {before}"
    for file in files:
        name = file.relative_to(before)
        ours, theirs = load_file(file), load_file(after / name)
        if ours.keys() != theirs.keys():
            return f"{name}: other names, such as {min(ours.keys() ^ theirs.keys())}"
        for key in sorted(ours):
            one, other = ours[key], theirs[key]
            if one.dtype != other.dtype or one.numpy().tobytes() != other.numpy().tobytes():
                largest = float((one.double() - other.double()).abs().max())
                return f"{name}: {key}, by up to {largest:.3g}"
        num_tensors += len(ours)
    for name in ("metrics.jsonl", "samples.jsonl"):
        ours, theirs = _rows(before / name), _rows(after / name)
        if len(ours) != len(theirs):
            return f"{name}: {len(ours)} rows and {len(theirs)}"
        for number, (row, other) in enumerate(zip(ours, theirs, strict=True), 1):
            for key in row:
                if key not in other or repr(row[key]) != repr(other[key]):
                    return f"{name}: row {number}, {key}: {row[key]} and {other.get(key)}"
            num_values += len(row)
    return f"equal ({num_tensors} tensors, {num_values:,} values)"


def _rows(file: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [json.loads(line) for line in file.open(encoding="utf-8")]
    return [{k: v for k, v in row.items() if not k.startswith(OF_TIME)} for row in rows]


def new_keys(before: Path, after: Path) -> list[str]:
    """Metrics that the second run has and the first has not."""
    ours, theirs = (
        {key for row in _rows(folder / "metrics.jsonl") for key in row}
        for folder in (before, after)
    )
    return sorted(theirs - ours)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path, help="a source tree")
    parser.add_argument("after", type=Path, help="another one")
    parser.add_argument("modes", nargs="*", help=f"of: quick start, {', '.join(MODES)} (all)")
    parser.add_argument("--folder", type=Path, help="kept afterwards; a temporary one")
    arguments = parser.parse_args()
    folder: Path = arguments.folder or Path(tempfile.mkdtemp(prefix="bitwise-"))
    trees = {"before": arguments.before.resolve(), "after": arguments.after.resolve()}
    num_unequal = 0
    for mode in arguments.modes or ["quick start", *MODES]:
        run_dirs = [_make(mode, tree, folder / mode / name) for name, tree in trees.items()]
        verdict = compare(*run_dirs)
        num_unequal += not verdict.startswith("equal")
        more = new_keys(*run_dirs)
        print(f"| {mode} | {verdict} | {', '.join(more) or '-'} |", flush=True)
    sys.exit(num_unequal > 0)


def _make(mode: str, tree: Path, folder: Path) -> Path:
    """Run a mode by the code of a tree; the run's folder."""
    folder.mkdir(parents=True)
    if mode == "quick start":
        _call(tree, folder, ["-m", "hone", "quickstart"])
        return folder / "runs" / "quickstart" / "rl"
    sections, flags = MODES[mode]
    merged = {name: _BASE.get(name, {}) | sections.get(name, {}) for name in _BASE | sections}
    (folder / "recipe.yaml").write_text(json.dumps(merged))  # JSON is YAML
    script = str(Path(__file__).resolve())
    _call(tree, folder, [script, "--inputs"])
    if "pipeline" not in sections:
        _call(tree, folder, ["-m", "hone", "rl", "recipe.yaml", *flags])
    else:
        stepped = [script, "--stepped", "rl", "recipe.yaml"]
        _call(tree, folder, stepped, interrupted_in=INTERRUPTED_IN_STEP)
        _call(tree, folder, stepped)
    return folder / "run"


def _call(tree: Path, folder: Path, words: list[str], *, interrupted_in: int = 0) -> None:
    environment = os.environ | {
        "PYTHONPATH": str(tree / "src"),
        "OMP_NUM_THREADS": "1",
        "INTERRUPTED_IN": str(interrupted_in),
    }
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != (TERMINATED if interrupted_in else 0):
        sys.exit(f"{tree}: {' '.join(words)}: exit code {done.returncode}\n{done.stdout}")


# -- in the processes of a tree --------------------------------------------------------------------


def _write_inputs() -> None:
    """A model, data and a reward function in the current folder."""
    from hone.data.arithmetic import ALPHABET, generate, write_jsonl
    from hone.models.tiny import make_char_tokenizer, make_tiny_model

    make_tiny_model(
        Path("model"),
        tokenizer=make_char_tokenizer(ALPHABET),
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=2,  # a tensor-parallel engine gives each rank one
        head_dim=16,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    rows = generate(100, seed=0, low=0, high=9)
    write_jsonl(Path("train.jsonl"), rows[:-20])
    write_jsonl(Path("eval.jsonl"), rows[-20:])
    Path("rewards.py").write_text(
        "def even(completion):\n"
        "    return sum(c in '02468' for c in completion) / max(len(completion), 1)\n"
    )


def _step_by_commands() -> None:
    """Let engine, scorer and trainer of an asynchronous run wait for each other, so that it is the
    same every time."""
    from hone.engine.worker import EngineWorker
    from hone.rewards.scorer import Scorer
    from hone.rollout import engine_pool
    from hone.rollout.collector import Collector

    setattr(EngineWorker, "_can_step", property(lambda self: False))  # noqa: B010  not by itself
    engine_pool.WAIT_S = 0.0  # nothing comes that is not there
    _wrap(EngineWorker, "__init__", _make_worker)
    _wrap(engine_pool.EnginePool, "step", _step_pool)
    _wrap(Scorer, "poll", _poll_scorer)
    _wrap(Collector, "_poll_until", _poll_behind)
    _wrap(Collector, "collect", _collect)


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Call `around(the method, self, ...)` in place of a method."""
    original = getattr(owner, name)

    def wrapped(self: Any, *args: Any, **options: Any) -> Any:
        return around(original, self, *args, **options)

    setattr(owner, name, wrapped)


def _make_worker(original: Callable[..., None], self: Any, *args: Any, **options: Any) -> None:
    """A worker of an engine that knows the command `tick`: make a step, if there is work."""
    original(self, *args, **options)

    def tick() -> None:
        if self._engine.has_unfinished:
            self._publish(self._engine.step())

    self._commands["tick"] = tick


def _step_pool(original: Callable[..., Any], self: Any) -> Any:
    for member in self._members:
        member.worker.call("tick").result()
    return original(self)


def _poll_scorer(original: Callable[..., list[Any]], self: Any, timeout_s: float = 0.0) -> Any:
    samples = original(self, timeout_s)
    while self.pending:
        samples += original(self, 1.0)
    return sorted(samples, key=lambda sample: sample.id)


def _poll_behind(original: Callable[..., None], self: Any, stop: Any) -> None:
    """However long the training takes, as many steps as ever."""
    del original, stop
    step = self._step if hasattr(self, "_step") else lambda: self._poll(0.0)  # its name before
    for _ in range(POLLS_PER_UPDATE):
        if self._is_busy:
            step()


def _collect(original: Callable[..., Any], self: Any, step: int, *args: Any) -> Any:
    if step == int(os.environ["INTERRUPTED_IN"]):
        os.kill(os.getpid(), signal.SIGTERM)
    return original(self, step, *args)


def _run_stepped(arguments: list[str]) -> int:
    from hone.cli.main import main as hone

    _step_by_commands()
    return hone(arguments)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inputs"]:
        _write_inputs()
    elif sys.argv[1:2] == ["--stepped"]:
        sys.exit(_run_stepped(sys.argv[2:]))
    else:
        main()
