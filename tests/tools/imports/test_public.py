"""Settings of public scripts and of five tuning guides become recipes that load, with the numbers
that the frameworks' own documents make of them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hone.config.load import load_config
from hone.config.recipe import read_recipe_list
from hone.config.tree import TREES
from hone.tools.imports.convert import convert
from hone.tools.imports.frameworks import read_command
from hone.tools.imports.imported import Imported
from hone.tools.imports.write import recipe
from tests.tables import table
from tests.tools.imports.test_import import filled_in, outcomes

PUBLIC: Mapping[str, Mapping[str, Any]] = {
    entry["origin"]: entry for entry in read_recipe_list(Path(__file__).with_name("public.yaml"))
}


def words(entry: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The framework, and the command with its flags or overrides."""
    framework, *command = entry["run"].split()
    if framework == "openrlhf":
        command[-1] = f"openrlhf.cli.{command[-1]}"
    elif framework == "verl":
        command[-1] = f"verl.trainer.{command[-1]}"
    elif framework == "relax":
        command[-1] = f"relax/entrypoints/{command[-1]}.py"
    given = shlex.split(entry.get("flags", ""))
    for prefix, settings in entry.get("settings", {}).items():
        head = "" if prefix == "others" else f"{prefix}."
        for setting in settings.split():
            plus = "+" if setting.startswith("+") else ""
            given.append(f"{plus}{head}{setting.removeprefix(plus)}")
    return framework, [*command, *given]


def imported(origin: str) -> Imported:
    return convert(read_command(*words(PUBLIC[origin])))


def test_there_are_as_many_scripts_as_were_kept() -> None:
    repositories = ("OpenRLHF/", "volcengine/verl:", "verl-project/verl:", "huggingface/trl:")
    counts = [sum(origin.startswith(name) for origin in PUBLIC) for name in repositories]
    assert counts == [13, 39, 1, 24]
    assert len(PUBLIC) == sum(counts) + 13


@table("origin", list(PUBLIC))
def test_its_recipe_loads_and_accounts_for_all(origin: str, tmp_path: Path) -> None:
    found = imported(origin)
    assert {one.name for one in found.source.given} <= outcomes(found)
    file = tmp_path / "mine.yaml"
    file.write_text(recipe(found, origin, "mine.yaml"), encoding="utf-8")
    load_config(TREES[found.source.command], file, filled_in(found))


_P, _N, _MINI = (
    "rollout.prompts_per_step",
    "rollout.n_samples_per_prompt",
    "trainer.prompts_per_minibatch",
)
_PROMPT, _COMPLETION = "data.max_prompt_tokens", "rollout.max_completion_tokens"
_TENSOR, _ENGINES = "engine.tensor_parallel_size", "cluster.num_engines"
_MICRO, _TOKENS = "trainer.micro_batch_size", "trainer.max_tokens_per_microbatch"
NUMBERS = [
    # A script, its training processes, and values worked out by hand.
    # 128 samples of a micro-batch over 8 GPUs are 16 on each; four optimizer steps a rollout.
    ("volcengine/verl: examples/grpo_trainer/run_qwen2-7b.sh", 8,
     {_P: 1024, _N: 5, _MINI: 256, _MICRO: 16, _PROMPT: 512, _COMPLETION: 512, _TENSOR: 2}),
    # The branch of its GPUs: 16 prompts and completions of 32,768 are those of NPUs.
    ("verl-project/verl: examples/grpo_trainer/run_qwen3_8b_fsdp.sh", 8,
     {_P: 1024, _N: 5, _MINI: 256, _TOKENS: 24576, _PROMPT: 1024, _COMPLETION: 2048, _TENSOR: 2,
      "trainer.enable_sleep": False, "algorithm.kl.coef": 0.001, "algorithm.kl.estimator": "k3"}),
    # 16 nodes of 8; 512 / 32 optimizer steps a rollout, of which 10 warm up, as its paper says;
    # 1,024 x 20 tokens of a completion.
    ("volcengine/verl: recipe/dapo/run_dapo_qwen2.5_32b.sh", 128,
     {_P: 512, _N: 16, _MINI: 32, _TOKENS: 22528, _PROMPT: 2048, _COMPLETION: 20480, _TENSOR: 4,
      "trainer.parallel.ulysses_size": 8, "trainer.enable_sleep": True,
      "trainer.optimizer.warmup_steps": 160, "algorithm.clip_high": 0.28,
      "rollout.dynamic_sampling": True, "reward.functions.1.args": {"buffer_tokens": 4096}}),
    # 3 nodes of 8: 24 = pipeline 3 x tensor 4 x 2.
    ("volcengine/verl: examples/grpo_trainer/run_moonlight16b_math_megatron.sh", 24,
     {_P: 192, _N: 5, _MINI: 64, _MICRO: 16, _COMPLETION: 2048, _TENSOR: 4,
      "trainer.parallel.pipeline_parallel_size": 3, "trainer.parallel.tensor_parallel_size": 4,
      "trainer.parallel.expert_parallel_size": 4}),
    # 100,000 rows / 1,024 prompts are 97 steps, each of 8 optimizer steps: 0.03 x 97 x 8 is 23.
    ("OpenRLHF/OpenRLHF: examples/scripts/train_ppo_llama_ray.sh", 2,
     {_P: 1024, _N: 1, _MINI: 128, _MICRO: 8, _PROMPT: 1024, _COMPLETION: 1024, "run.steps": 97,
      "trainer.optimizer.warmup_steps": 23, _ENGINES: 2, _TENSOR: 2, "cluster.num_trainers": 2,
      "cluster.num_critics": 2, "cluster.num_references": 0, "cluster.num_reward_models": 0}),
    # 128 samples are 16 prompts of 8; 20,000 rows / 128 prompts are 156 steps.
    ("OpenRLHF/OpenRLHF: examples/scripts/train_dapo_ray_hybrid_engine.sh", 8,
     {_P: 128, _N: 8, _MINI: 16, "run.steps": 156, _ENGINES: 0, _TENSOR: 2,
      "engine.enable_sleep": True, "trainer.enable_sleep": True, "algorithm.clip_high": 0.27,
      "algorithm.kl.coef": 0.001, "algorithm.kl.placement": "loss"}),
    # 1,024 samples are 64 prompts of 16, of 512: eight optimizer steps a rollout.
    ("OpenRLHF/OpenRLHF: examples/scripts/train_prorlv2_math_hybrid_engine.sh", 8,
     {_P: 512, _N: 16, _MINI: 64, _PROMPT: 1024, _COMPLETION: 8192, _TENSOR: 1, _TOKENS: 32768,
      "eval.every_n_steps": 5, "eval.n_samples_per_prompt": 4, "algorithm.correction.low": 0.5,
      "algorithm.correction.high": 5.0, "data.eval.0.columns.answer": "label"}),
    # 1,024 samples are all 128 prompts of 8; 128,000 rows are 1,000 steps; 2 engines of 2.
    ("OpenRLHF/OpenRLHF: examples/scripts/train_reinforce_baseline_ray_agent_async.sh", 4,
     {_P: 128, _N: 8, _MINI: None, "run.steps": 1000, _COMPLETION: 64000, _ENGINES: 2, _TENSOR: 2,
      "cluster.num_trainers": 4, "cluster.num_references": 0, "pipeline.max_staleness": 1,
      "trainer.parallel.ring_size": 2}),
    # 500,000 rows / 256 are 1,953 steps.
    ("OpenRLHF/OpenRLHF: examples/scripts/train_sft.sh", 1,
     {"data.examples_per_step": 256, "run.steps": 1953, _MICRO: 2, "data.max_tokens": 2048}),
    # 4 + 4 + 4 + 4 + 2 x 2 are 20 devices, of a template for 16.
    ("OpenRLHF's guide of 0.10: 16x A100, distributed", 4,
     {"cluster.num_trainers": 4, "cluster.num_critics": 4, "cluster.num_references": 4,
      _ENGINES: 2, _TENSOR: 2}),
    # 8 x 2 samples of an optimizer step are 2 prompts of 8; 8 x 8 of a rollout are 8 prompts.
    ("huggingface/trl: examples/scripts/gspo.py", 1,
     {_P: 8, _N: 8, _MINI: 2, _PROMPT: 2048, _COMPLETION: 1024, "algorithm.loss": "gspo"}),
    # 2 x 8 rows of an optimizer step.
    ("huggingface/trl: trl/scripts/dpo.py, full", 1,
     {"data.examples_per_step": 16, "data.max_tokens": 1024, "eval.every_n_steps": 50}),
    # 8 rows, as TRL has them where nothing is given, on 4 processes.
    ("huggingface/trl: docs/source/clis.md, SFT, four processes", 4,
     {"data.examples_per_step": 32, "data.shuffle": True}),
]  # fmt: skip


@table("origin, processes, expected", NUMBERS)
def test_its_numbers_are_those_worked_out_by_hand(
    origin: str, processes: int, expected: dict[str, object]
) -> None:
    found = imported(origin)
    assert found.processes == processes
    assert {key: found.key(key) for key in expected} == expected
