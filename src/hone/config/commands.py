"""The commands of hone: one entry each, from which the usage page, help, completion and the choice
of the module follow.

A command is the module of its name in `hone.cli`, with `run(argv)`. One that reads a configuration
also has a tree in `hone.config.tree.TREES`. Every start of `hone` reads this module, so it imports
nothing else of hone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["COMMAND", "COMMANDS", "RECIPE", "Command", "FirstPage"]

RECIPE, COMMAND = "RECIPE", "COMMAND"
"""Among `words`: the name of any recipe, and that of any command that a recipe may be for."""

_GOES_ON = "the same command goes on from the last checkpoint, or starts over without one"
_SAME = "the same command goes on"
_GENERATION = {
    f"rollout.{key}": f"generation.{key}"
    for key in ("max_completion_tokens", "temperature", "stop")
}


@dataclass(frozen=True, slots=True)
class FirstPage:
    """Content of the first help page of a command that reads a configuration."""

    keys: str
    """The most used keys, in the order in which one usually sets them."""
    examples: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One word after `hone`."""

    summary: str
    """Its line on the page that `hone` alone prints."""
    module: str | None = None
    """Its module in `hone.cli`, where that has not its name. The module of another command is also
    given the name of this one."""
    other_names: tuple[str, ...] = ()
    """Names that people may try for it."""
    interrupted: str = "nothing was written"
    """What remains after Ctrl-C at a time when nothing can be saved."""
    has_recipes: bool = False
    """Whether a recipe may be for it, which may follow it; then it takes `--nproc` too."""
    same_keys: Mapping[str, str] = field(default_factory=dict[str, str])
    """Keys of `hone rl`, with those of its tree that say the same."""
    unread_keys: tuple[str, ...] = ()
    """Keys of its tree that it has no use for in a recipe of another command."""
    page: FirstPage | None = None
    actions: Mapping[str, FirstPage | None] = field(default_factory=dict[str, FirstPage | None])
    """Words that follow it, before a recipe; with a page those that read a configuration."""
    words: tuple[str, ...] = ()
    """What else may follow it, files apart: for completion."""
    flags: tuple[str, ...] = ()
    """Its flags besides the keys of its tree."""


COMMANDS: Mapping[str, Command] = {
    "quickstart": Command(
        summary="make a tiny model and watch it learn arithmetic on this machine",
        interrupted=_SAME,
        words=("--seed", "--dir"),
        flags=("--seed", "--dir"),
    ),
    "rl": Command(
        summary="train by reinforcement learning with verifiable rewards",
        other_names=("train", "grpo", "ppo", "finetune", "fine-tune"),
        interrupted=_GOES_ON,
        has_recipes=True,
        page=FirstPage(
            "model.path data.train.0.path data.eval.0.path data.max_prompt_tokens"
            " reward.functions.0.fn rollout.prompts_per_step rollout.n_samples_per_prompt"
            " rollout.max_completion_tokens algorithm.loss trainer.optimizer.lr"
            " trainer.max_tokens_per_microbatch eval.every_n_steps run.steps run.dir log.to",
            "hone rl gsm8k --model.path Qwen/Qwen3-0.6B --run.steps 3  # a trial\n"
            "hone rl --model.path Qwen/Qwen3-0.6B --data.train.0.path my.jsonl \\\n"
            "  --reward.functions.0.fn rewards.py:score           # your data, your reward\n"
            "hone rl gsm8k --nproc 8 --trainer.parallel.zero_stage 3    # on eight GPUs",
        ),
    ),
    "sft": Command(
        summary="train on demonstrations",
        other_names=("train", "finetune", "fine-tune"),
        interrupted=_GOES_ON,
        has_recipes=True,
        page=FirstPage(
            "model.path data.train.0.path data.eval.0.path data.max_tokens data.examples_per_step"
            " data.train_on_prompt trainer.optimizer.lr trainer.optimizer.warmup_steps"
            " trainer.optimizer.schedule trainer.max_tokens_per_microbatch model.lora.rank"
            " eval.every_n_steps run.steps run.dir log.to",
            "hone sft --model.path Qwen/Qwen3-0.6B --data.train.0.path my.jsonl \\\n"
            "  --trainer.optimizer.lr 1e-5        # rows with `prompt` and `completion`\n"
            "hone sft mine.yaml --run.steps 3     # a trial of a recipe\n"
            "hone sft mine.yaml --nproc 8 --trainer.parallel.zero_stage 3",
        ),
    ),
    "dpo": Command(
        summary="learn from preferences: DPO, KTO, ORPO, SimPO and kin",
        module="sft",
        other_names=("kto", "orpo", "simpo"),
        interrupted=_GOES_ON,
        has_recipes=True,
        page=FirstPage(
            "model.path data.train.0.path data.eval.0.path data.max_tokens data.examples_per_step"
            " algorithm.loss algorithm.beta trainer.optimizer.lr trainer.optimizer.warmup_steps"
            " trainer.max_tokens_per_microbatch model.lora.rank eval.every_n_steps run.steps"
            " run.dir log.to",
            "hone dpo --model.path runs/sft/model --data.train.0.path pairs.jsonl \\\n"
            "  --trainer.optimizer.lr 1e-6        # `prompt`, `chosen` and `rejected`\n"
            "hone dpo mine.yaml --algorithm.loss kto     # `prompt`, `completion`, `label`\n"
            "hone dpo mine.yaml --nproc 8 --trainer.parallel.zero_stage 3",
        ),
    ),
    "reward-model": Command(
        summary="train a model that scores completions, on pairs",
        module="sft",
        other_names=("rewardtrainer", "reward_trainer", "reward", "train_rm", "rm"),
        interrupted=_GOES_ON,
        has_recipes=True,
        page=FirstPage(
            "model.path data.train.0.path data.eval.0.path data.max_tokens data.examples_per_step"
            " algorithm.center_coef trainer.optimizer.lr trainer.optimizer.warmup_steps"
            " trainer.max_tokens_per_microbatch model.lora.rank eval.every_n_steps run.steps"
            " run.dir log.to",
            "hone reward-model --model.path runs/sft/model \\\n"
            "  --data.train.0.path pairs.jsonl    # `prompt`, `chosen` and `rejected`\n"
            "hone reward-model mine.yaml --nproc 8 --trainer.parallel.zero_stage 3",
        ),
    ),
    "generate": Command(
        summary="sample completions for prompts from a file",
        other_names=("infer", "inference", "sample"),
        interrupted=_SAME,
        has_recipes=True,
        same_keys=_GENERATION,
        unread_keys=("data.eval", "data.eval_fraction"),
        page=FirstPage(
            "model.path data.train.0.path data.train.0.max_rows n_samples_per_prompt"
            " generation.max_completion_tokens generation.temperature generation.top_p"
            " generation.stop reward.functions.0.fn keep output",
            "hone generate --model.path Qwen/Qwen3-0.6B --data.train.0.path my.jsonl\n"
            "hone generate gsm8k --data.train.0.max_rows 10   # what its run has trained\n"
            "hone generate gsm8k --n_samples_per_prompt 8 --keep best --output best.jsonl",
        ),
    ),
    "serve": Command(
        summary="serve a model over HTTP: OpenAI's and Anthropic's APIs",
        other_names=("server", "api"),
        has_recipes=True,
        same_keys=_GENERATION,
        page=FirstPage(
            "model.path serve.host serve.port serve.key_file serve.max_model_len"
            " serve.max_requests serve.max_sessions generation.max_completion_tokens"
            " generation.temperature engine.gpu_memory_utilization engine.max_num_seqs",
            "hone serve --model.path Qwen/Qwen3-0.6B   # prints its address and a key\n"
            "hone serve gsm8k --serve.port 8000      # what its run has trained\n"
            "hone serve gsm8k --nproc 8              # an engine on each of eight GPUs",
        ),
    ),
    "eval": Command(
        summary="score a model on a data set",
        other_names=("evaluate",),
        has_recipes=True,
        same_keys={"rollout.stop": "eval.stop"},
        page=FirstPage(
            "model.path data.eval.0.path data.eval.0.answer_pattern data.max_prompt_tokens"
            " reward.functions.0.fn eval.n_samples_per_prompt eval.max_completion_tokens"
            " eval.temperature eval.pass_function run.dir",
            "hone eval gsm8k              # what its run has trained, else the start model\n"
            "hone eval gsm8k --model.path Qwen/Qwen3-0.6B           # the start model again\n"
            "hone eval gsm8k --eval.n_samples_per_prompt 8 --eval.temperature 1 # pass@8",
        ),
    ),
    "data": Command(
        summary="show what a run would read of its data, count it, or check it",
        other_names=("dataset", "datasets", "inspect"),
        actions={"show": None, "stats": None, "check": None},
        flags=("--rows", "--from", "--for", "--output"),
    ),
    "env": Command(
        summary="play an environment turn by turn, or check it; needs no model",
        other_names=("environment", "play"),
        actions={"try": None, "check": None},
        flags=("--rows", "--script", "--turns", "--raw", "--json"),
    ),
    "report": Command(
        summary="draw the report of a run, or of several side by side",
        other_names=("plot", "compare"),
    ),
    "watch": Command(
        summary="serve the report of a run as a page that keeps up with it",
    ),
    "trace": Command(
        summary="merge the traces of a step, and list what takes longest",
        other_names=("profile",),
    ),
    "bench": Command(
        summary="measure the engine (or compare vLLM), training, or image data",
        actions={
            "engine": FirstPage(
                "model.path model.shape workload decode.batch decode.context engine.max_num_seqs"
                " engine.gpu_memory_utilization against output",
                "hone bench engine --model.shape qwen3-0.6b --workload groups",
            ),
            "train": FirstPage(
                "model.path model.shape rows.tokens rows.per_step trainer.max_tokens_per_microbatch"
                " trainer.recompute objective steps output",
                "hone bench train --model.shape qwen3-0.6b",
            ),
            "data": None,
        },
    ),
    "plan": Command(
        summary="find what fits GPUs of a type, and what is fastest; needs none",
        other_names=("simulate",),
        words=(RECIPE,),
        page=FirstPage(
            "plan.gpus plan.gpu plan.lengths.median plan.lengths.path"
            " plan.staleness model.path rollout.prompts_per_step rollout.n_samples_per_prompt"
            " rollout.max_completion_tokens output",
            "hone plan gsm8k --plan.gpus 8 --output plan.yaml",
        ),
    ),
    "tune": Command(
        summary="measure the best of plan on this machine, and write the fastest",
        interrupted=_SAME,
        words=(RECIPE,),
        flags=("--nproc", "--candidates", "--steps-each"),
    ),
    "doctor": Command(
        summary="measure whether this machine is right, with remedies",
        flags=("--run.dir", "--json"),
    ),
    "check": Command(
        summary="check a recipe and print its derived numbers; needs no GPU",
        other_names=("validate",),
        words=(COMMAND, RECIPE),
        flags=("--gpu", "--json"),
    ),
    "import": Command(
        summary="make a recipe of a script for OpenRLHF, verl, Relax or TRL",
        module="import_",  # `import` is a keyword of Python
    ),
    "recipes": Command(
        summary="list the recipes that come with hone, show or copy one",
        actions={"show": None, "copy": None},
    ),
    "completion": Command(
        summary="print a script that completes keys and values in your shell",
        words=("bash", "zsh", "fish"),
    ),
}
