"""Functions that convert values of other frameworks where a map is not enough: those that `by` of
`aliases.yaml` names.

Functions of several lines end with `_` and take the value, the import so far and the row. Each
returns hone's value, or `Keys` of several.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hone.address import is_address
from hone.config.aliases import Alias
from hone.images.parts import IMAGE_COLUMNS
from hone.tools.imports.imported import Imported
from hone.tools.imports.source import Given, Unread, text_of

__all__ = ["Keys", "NotServed", "Nothing", "finish", "processes", "transform"]


class NotServed(Exception):
    """Raised if hone has nothing for this value; the text says why."""


class Nothing(Exception):
    """Raised if nothing has to be set for this value; the text says why."""


class Keys(dict[str, Any]):
    """Values of several keys."""


_PROMPTS, _SAMPLES = "rollout.prompts_per_step", "rollout.n_samples_per_prompt"
_MINIBATCH = "trainer.prompts_per_minibatch"
_KIND, _COEF, _PLACEMENT = (
    "algorithm.correction.kind",
    "algorithm.kl.coef",
    "algorithm.kl.placement",
)
_SCORES = ("reward.functions", "reward.model.path", "teacher.path", "env.path")
_COLOCATED = ("train.colocate_all", "colocate_all_models", "colocate")


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _texts(value: Any) -> list[str]:
    """Names in a text, separated by commas, or in a list."""
    return [part.strip() for item in _list(value) for part in text_of(item).split(",")]


# Numbers and names

_ALL = 1_000_000
"""More checkpoints than any run writes, where the framework keeps all."""
_TRL_LOGGING_STEPS = 10
"""TRL's own default; that of transformers is 500."""
_OF_VALUE: Mapping[str, Callable[[Any], Any]] = {
    "not": lambda value: not value,
    "is_given": lambda value: True if value else None,
    "at_least_0": lambda value: None if value is None or value < 0 else value,
    "at_least_1": lambda value: None if value is None or value < 1 else value,
    "kept": lambda value: _ALL if value is None or value < 1 else value,
    "rounded_up": lambda value: max(1, math.ceil(value)),
    "inverse": lambda value: 1 / value if value else None,
    "minutes": lambda value: value * 60,
    "megabytes": lambda value: value << 20,
    "lower": lambda value: [part.lower() for part in _texts(value)],
    "modules": lambda value: (
        None if value in (None, "all-linear", ["all-linear"]) else _texts(value)
    ),
    "train_sources": lambda value: _numbered("data.train.*.path", _texts(value)),
    "source_weights": lambda value: _numbered("data.train.*.weight", map(float, _texts(value))),
    "reward_weights": lambda value: (
        _numbered("reward.functions.*.weight", _list(value)) if value else None
    ),
}
"""Functions of the value alone."""
_OF_RUN: Mapping[str, Callable[[Any, Imported], Any]] = {
    "rank_of_peft": lambda value, run: run.given("lora_r", default=16) if value else 0,
    "share_of_lr": lambda value, run: value / run.key("trainer.optimizer.lr"),
    "nll": lambda value, run: (
        {run.key("algorithm.loss"): 1.0, "sft": float(value)} if value else None
    ),
    "recorder": lambda value, run: run.given("memory_recorder", default="torch") if value else None,
}
"""Functions of the value and other settings."""


def transform(name: str, value: Any, run: Imported, row: Alias) -> Any:
    """Convert a value with the function that a row names."""
    if name in _OF_VALUE:
        return _OF_VALUE[name](value)
    if name in _OF_RUN:
        return _OF_RUN[name](value, run)
    return globals()[f"{name}_"](value, run, row)


def both_(value: Any, run: Imported, row: Alias) -> Any:
    return Keys(dict.fromkeys(row.to, value))


def in_order_(value: Any, run: Imported, row: Alias) -> Any:
    return None if value is None else Keys(zip(row.to, value, strict=True))


# Data


def eval_sources_(value: Any, run: Imported, row: Alias) -> Any:
    if run.source.framework != "relax":
        return _numbered("data.eval.*.path", _texts(value)) if value else None
    names = _list(value)  # pairs of a name and a path
    return Keys(
        _numbered("data.eval.*.path", names[1::2]) | _numbered("data.eval.*.task", names[::2])
    )


def _numbered(key: str, values: Iterable[Any]) -> Keys:
    return Keys((key.replace("*", str(number)), value) for number, value in enumerate(values))


def test_split_(value: Any, run: Imported, row: Alias) -> Any:
    if run.given("eval_strategy", default="no") == "no" or not run.given("dataset_name"):
        raise Nothing("nothing is evaluated")
    return Keys({"data.eval.0.path": run.given("dataset_name"), "data.eval.0.split": value})


def template_(value: Any, run: Imported, row: Alias) -> Any:
    if value is None or "{}" not in value:
        return None
    return value.replace("\\n", "\n").replace("{}", "{prompt}")


def columns_(value: Any, run: Imported, row: Alias) -> Any:
    """Column of the training rows and of the evaluation rows."""
    key = next(key for key in row.to if run.has(key))
    keys = [key]
    if run.is_set("data.eval.0.path"):
        keys.append(key.replace("data.train", "data.eval"))
    return None if value is None else Keys(dict.fromkeys(keys, value))


def images_column_(value: Any, run: Imported, row: Alias) -> Any:
    if value in IMAGE_COLUMNS:
        raise Nothing(f"a column {value} is found by its name")
    return columns_(value, run, row)


def pixels_(value: Any, run: Imported, row: Alias) -> Any:
    """Tokens of an image from its pixels, whose number a token depends on the model."""
    side = 32 if re.search("qwen3[-_.]?vl", str(run.key("model.path")), re.IGNORECASE) else 28
    tokens = max(1, value // side**2)
    run.warn(f"{value} pixels of an image are {tokens} tokens of {side} x {side} pixels "
             "(data.max_image_tokens).")  # fmt: skip
    return tokens


def longest_row_(value: Any, run: Imported, row: Alias) -> Any:
    """The longest prompt and completion together."""
    if value is None or not run.is_rl:
        return value
    prompt, completion = row.to[1:]
    known = [key for key in (prompt, completion) if run.is_set(key)]
    if len(known) == 2 or run.source.framework == "relax":
        raise Nothing(f"{prompt} and {completion} say it")
    if known:
        other = completion if known[0] == prompt else prompt
        return Keys({other: value - run.key(known[0])})
    run.warn(f"the longest prompt and completion together have {value} tokens there; here each has "
             "a limit, and gets a half.")  # fmt: skip
    return Keys({prompt: value // 2, completion: value - value // 2})


# Batches and steps


def processes(run: Imported) -> int:
    """Number of training processes, from settings for the devices of each node."""
    given = run.given
    if run.source.framework == "relax":
        actor = given("resource.actor", default=None)
        if isinstance(actor, list) and all(isinstance(part, int) for part in actor):
            return math.prod(actor)
    nodes = given("actor.num_nodes", "actor_num_nodes", "trainer.nnodes", default=1)
    each = given("actor.num_gpus_per_node", "actor_num_gpus_per_node", "trainer.n_gpus_per_node",
                 default=8 if run.is_rl and run.source.framework != "trl" else 1)  # fmt: skip
    return nodes * each if isinstance(nodes, int) and isinstance(each, int) else 1


def samples_to_prompts_(value: Any, run: Imported, row: Alias) -> Any:
    """Samples of a rollout or of an optimizer step, over all devices."""
    if value is None or not run.is_rl:
        return value
    if row.to[0] == _PROMPTS:
        return max(1, math.ceil(value / run.key(_SAMPLES)))
    return _minibatch(value / run.key(_SAMPLES), f"{value} samples of an optimizer step", run)


def minibatch_(value: Any, run: Imported, row: Alias) -> Any:
    """Prompts of an optimizer step, over all devices."""
    return _minibatch(value, f"{value} prompts of an optimizer step", run) if run.is_rl else value


def steps_per_rollout_(value: Any, run: Imported, row: Alias) -> Any:
    return value and _minibatch(run.key(_PROMPTS) / value, f"{value} steps a rollout", run)


def _minibatch(prompts: float, what: str, run: Imported) -> int | None:
    """The nearest number of prompts that divides the prompts of a step."""
    step = run.key(_PROMPTS)
    nearest = min(_divisors(step), key=lambda size: abs(math.log(size / prompts)))
    if nearest != prompts:
        run.warn(f"{what}: {prompts:g} prompts of {run.key(_SAMPLES)} samples; the nearest number "
                 f"that divides {_PROMPTS} {step} is {nearest}.")  # fmt: skip
    return None if nearest == step else nearest


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def generated_batch_(value: Any, run: Imported, row: Alias) -> Any:
    further = (value or 0) - run.key(_PROMPTS)
    if further <= 0 or not run.given("partial_rollout") or run.given("fully_async"):
        raise Nothing(
            "prompts are drawn as a step needs them, further ones where groups are dropped"
        )
    return further


def device_batch_(value: Any, run: Imported, row: Alias) -> Any:
    """Batch sizes from TRL's samples per micro-batch, of which optimizer steps and rollouts are
    multiples."""
    accumulation = run.given("gradient_accumulation_steps", default=1)
    samples = value * accumulation * run.processes
    assumed = "" if run.source.processes else " (assumed; with N multiply by N)"
    what = (f"per_device_train_batch_size {value} x gradient_accumulation_steps {accumulation} x "
            f"{run.processes} process{assumed}")  # fmt: skip
    if not run.is_rl:
        run.warn(f"{what} are {samples} rows an optimizer step (data.examples_per_step).")
        return Keys({"data.examples_per_step": samples})
    of_prompt = run.key(_SAMPLES)
    batches = run.given("steps_per_generation", default=accumulation)
    generated = run.given("generation_batch_size") or batches * value * run.processes
    prompts = max(1, math.ceil(generated / of_prompt))
    run.warn(f"{what} are {samples} samples an optimizer step, {samples / of_prompt:g} prompts of "
             f"{of_prompt}; {generated} samples a rollout, {prompts} prompts.")  # fmt: skip
    made = Keys({_PROMPTS: prompts})
    if generated > samples:
        most = max(1, samples // of_prompt)
        made[_MINIBATCH] = max(size for size in _divisors(prompts) if size <= most)
    return made


def _steps_per_rollout(run: Imported) -> float:
    """Optimizer steps that a rollout makes."""
    if not run.is_rl:
        return 1
    return (
        run.key(_PROMPTS)
        / (run.key(_MINIBATCH) or run.key(_PROMPTS))
        * run.key("trainer.num_epochs")
    )


def epochs_(value: Any, run: Imported, row: Alias) -> Any:
    """Passes over a rollout, or over the data in supervised training."""
    return value if run.is_rl else steps_of_epochs_(value, run, row)


def steps_of_epochs_(value: Any, run: Imported, row: Alias) -> Any:
    """Number of steps of these passes over the data, if the number of rows is known."""
    if run.is_set("run.steps") or value is None:
        raise Nothing("run.steps is set")
    rows = [
        run.key(key)
        for key in run.values
        if key.startswith("data.train.") and key.endswith(".max_rows")
    ]
    batch = run.key(_PROMPTS if run.is_rl else "data.examples_per_step")
    if not rows:
        run.leave_open("run.steps", f"{value:g} x rows / {batch}, for {value:g} passes over the "
                       "data, whose number of rows is not known here")  # fmt: skip
        raise Nothing("run.steps is to be filled in")
    run.warn(f"{value:g} passes over the data are {value:g} x {sum(rows)} / {batch} steps where "
             "there are as many rows as max_rows allows.")  # fmt: skip
    return max(1, math.floor(value * sum(rows) / batch))


def optimizer_steps_(value: Any, run: Imported, row: Alias) -> Any:
    if value is None or value <= 0:
        raise Nothing("num_train_epochs decides")
    return max(1, round(value / _steps_per_rollout(run)))


def warmup_(value: Any, run: Imported, row: Alias) -> Any:
    """Optimizer steps of the warm-up. The schedule of verl moves once a rollout."""
    if value is None or value < 0:
        return None
    per_step = _steps_per_rollout(run) if run.source.framework == "verl" else 1
    if value and per_step != 1:
        run.warn(f"lr_warmup_steps {value} counts rollouts there, and each makes {per_step:g} "
                 "optimizer steps, which are counted here.")  # fmt: skip
    return round(value * per_step)


def warmup_share_(value: Any, run: Imported, row: Alias) -> Any:
    if not value:
        return None
    if not run.is_set("run.steps"):
        run.leave_open("trainer.optimizer.warmup_steps", f"{value:g} of all optimizer steps")
        raise Nothing("trainer.optimizer.warmup_steps is to be filled in")
    return round(value * run.key("run.steps") * _steps_per_rollout(run))


def rollouts_(value: Any, run: Imported, row: Alias) -> Any:
    """Steps of ours between evaluations or checkpoints; TRL counts optimizer steps, and a number
    below 1 is a share of all of them."""
    if value is None or value <= 0:
        return None
    if run.source.framework != "trl":
        return value
    if value >= 1:
        return max(1, round(value / _steps_per_rollout(run)))
    if run.is_set("run.steps"):
        return max(1, math.ceil(value * run.key("run.steps")))
    raise NotServed(f"a share of all steps, whose number is not known; set {row.to[0]}")


def eval_strategy_(value: Any, run: Imported, row: Alias) -> Any:
    """Steps between evaluations where `eval_steps` does not say it: transformers takes those of
    `logging_steps` then."""
    if text_of(value) == "no":
        raise Nothing("nothing is evaluated")
    if value != "steps":
        raise NotServed(f"an evaluation each {value}; eval.every_n_steps counts steps")
    if run.given("eval_steps"):
        raise Nothing("eval_steps says how often")
    if not run.is_set("data.eval.0.path"):
        raise Nothing("nothing to evaluate on could be read")
    return rollouts_(run.given("logging_steps", default=_TRL_LOGGING_STEPS), run, row)


def rollouts_or_end_(value: Any, run: Imported, row: Alias) -> Any:
    return rollouts_(value, run, row) or 0


def _is_dynamic(run: Imported) -> bool:
    names = ("train.dynamic_batch_enable", "use_dynamic_batch", "actor.use_dynamic_bsz",
             "use_dynamic_bsz", "use_dynamic_batch_size")  # fmt: skip
    return bool(run.given(*names, default=run.source.program.startswith("sft_trainer")))


def budget_(value: Any, run: Imported, row: Alias) -> Any:
    if not _is_dynamic(run):
        raise Nothing("micro-batches are counted in sequences (trainer.micro_batch_size)")
    if value == run.key("trainer.max_tokens_per_microbatch") and row.to[0].endswith("forward"):
        raise Nothing("unset, it is twice trainer.max_tokens_per_microbatch")
    if run.source.framework == "verl":
        run.warn("budgets of tokens are soft limits in verl and hard caps here.")
    return value


def microbatch_(value: Any, run: Imported, row: Alias) -> Any:
    if _is_dynamic(run) or value is None:
        raise Nothing("micro-batches are cut by tokens (trainer.max_tokens_per_microbatch)")
    if run.source.command in ("dpo", "reward-model"):
        return 2 * value  # of ours, the two of a pair are two
    return value


def global_microbatch_(value: Any, run: Imported, row: Alias) -> Any:
    return microbatch_(value and max(1, value // run.processes), run, row)


# Samples and rewards


def stops_(value: Any, run: Imported, row: Alias) -> Any:
    return None if value is None else [*(run.key("rollout.stop") or ()), *_list(value)]


def partial_(value: Any, run: Imported, row: Alias) -> Any:
    if not value:
        return None
    if (
        run.given("train.async_enable", "async_train", "fully_async")
        or "async" in run.source.program
    ):
        return Keys({"pipeline.in_flight": "pause"})
    if not run.is_set("rollout.oversample_prompts"):
        run.to_do.append("rollout.oversample_prompts: unfinished samples are carried over where "
                         "more prompts are started than trained; say how many more")  # fmt: skip
    raise Nothing("unfinished samples are carried over (rollout.oversample_prompts)")


def reward_file_(value: Any, run: Imported, row: Alias) -> Any:
    """Rewards of OpenRLHF: files with `reward_func`, or servers that share the requests."""
    if any(is_address(part) for part in _texts(value)):
        if len(_texts(value)) > 1:
            raise NotServed("several servers that share the requests; put a balancer before them")
        return Keys({"reward.functions.0.fn": _texts(value)[0]})
    return _numbered("reward.functions.*.fn", [f"{part}:reward_func" for part in _texts(value)])


def agent_file_(value: Any, run: Imported, row: Alias) -> Any:
    """The agent of OpenRLHF: the class `AgentExecutor` of a file or a module."""
    return f"{value}:AgentExecutor" if value else None


def environment_class_(value: Any, run: Imported, row: Alias) -> Any:
    """TRL's maker of environments, where it is a class of the script or of a module."""
    return _in_file(value, "no class in a file; name the class that it makes in env.path")


_VERL_FILES = (
    ("multi_turn.tool_config_path", "data.tool_config_path"),
    ("multi_turn.function_tool_path", "data.function_tool_path"),
    ("multi_turn.interaction_config_path",),
)
"""Settings of verl that name files of tools, functions and interactions."""


def verl_files_(value: Any, run: Imported, row: Alias) -> Any:
    """The environment of all files of tools and interactions that are given."""
    if not value:
        raise Nothing("it names no file")
    names = [text_of(name) for ends in _VERL_FILES if (name := run.given(*ends))]
    for name in names:
        run.to_do += [text for text in _in_tools(name) if text not in run.to_do]
    run.warn(
        "tools and interactions run as they are; docs/environments.md says what differs. What they "
        "reward goes to extra_info of the reward function, as there (env.args.count_rewards)."
    )
    return f"verl:{','.join(names)}"


def _in_tools(name: str) -> Iterator[str]:
    """What is to be done for the classes that a file of tools names, where it is here."""
    path = Path(name)
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    shipped = re.findall(r"class_name:\s*[\"']?(verl\.[\w.]+)", text)
    if shipped:
        yield (
            f"env.path: {name} names {', '.join(shipped)}, which come with verl: install verl in "
            "hone's environment, or copy the classes into a file of your own"
        )
    if re.search(r"type:\s*[\"']?mcp\b", text):
        yield (
            f"env.tools: {name} has a server (MCP); name it in env.tools as mcp:COMMAND or "
            "mcp:https://..., and take it out of the file"
        )


def verl_turns_(value: Any, run: Imported, row: Alias) -> Any:
    """Most turns of the policy. After `max_user_turns` answers one more turn is sampled there."""
    own = run.given("multi_turn.max_assistant_turns")
    answers = run.given("multi_turn.max_user_turns")
    limits = [*([own] if own else []), *([answers + 1] if answers else [])]
    if not limits:
        raise Nothing("there is no limit")
    return min(limits)


def verl_answer_length_(value: Any, run: Imported, row: Alias) -> Any:
    """Longest answer of a tool: characters there, tokens here, at four characters a token."""
    tokens = max(1, math.ceil(value / 4))
    run.warn(
        f"max_tool_response_length {value} counts characters, and env.max_observation_tokens "
        f"counts tokens: {tokens} are about as much English, and less of code or numbers."
    )
    return tokens


def tool_functions_(value: Any, run: Imported, row: Alias) -> Any:
    """TRL's tools: functions of the script or of a module."""
    why = "no function in a file; name each tool in env.tools as my_tools.py:search"
    return [_in_file(entry, why) for entry in _list(value)]


def _in_file(value: Any, otherwise: str) -> str:
    """A name of a script or a module, with a colon before the last part. Raises NotServed."""
    name = text_of(value)
    if ":" not in name and not isinstance(value, Unread):
        name = ":".join(name.rsplit(".", 1))
    if ":" not in name or isinstance(value, Unread):
        raise NotServed(f"{name}, which is {otherwise}")
    return name


def reward_path_(value: Any, run: Imported, row: Alias) -> Any:
    if value is None:
        return None
    if run.source.framework == "relax":
        raise NotServed(
            "functions of (args, sample); those of hone ask for completion and answer by name"
        )
    name = run.given("custom_reward_function.name", default="compute_score")
    return Keys({"reward.functions.0.fn": f"{value}:{name}"})


def verl_default_reward_(value: Any, run: Imported, row: Alias) -> Any:
    if run.is_set("reward.functions.0.fn"):
        raise Nothing("the function is named (reward.functions)")
    if run.given(*_REWARD_MODEL_SWITCHES):
        raise Nothing("the reward model scores (reward.model)")
    run.warn("verl chooses a reward by data_source (gsm8k, MATH, ...) where none is named; here it "
             "is `math`, the nearest to these.")  # fmt: skip
    return Keys({"reward.functions.0.fn": "math"})


_TRL_REWARDS: dict[str, dict[str, Any]] = {
    "accuracy_reward": {"fn": "math", "args": {"latex_only": True}},
    "reasoning_accuracy_reward": {"fn": "math", "args": {"latex_only": True}},
    "think_format_reward": {"fn": "format", "args": {"tags": ["think"]}},
}


def reward_list_(value: Any, run: Imported, row: Alias) -> Any:
    """Functions of the script, of a module, or TRL's own."""
    made = Keys()
    for entry in _list(value):
        name = text_of(entry)
        if ":" not in name and not isinstance(entry, Unread):
            name = ":".join(name.rsplit(".", 1))
        module, _, function = name.rpartition(":")
        # A function of the script may have the name of one of TRL's.
        is_theirs = not module.endswith(".py") and module.partition(".")[0] in ("", "trl")
        own = _TRL_REWARDS.get(function) if is_theirs else None
        if own is None and (":" not in name or isinstance(entry, Unread)):
            is_model = isinstance(entry, str) and "/" in entry and "reward.model.path" not in made
            if not is_model:
                raise NotServed(f"{name}, which is no function in a file, and no first model")
            made["reward.model.path"] = entry
            continue
        number = sum(key.endswith(".fn") for key in made)
        for key, part in (own or {"fn": name, "whole_groups": True}).items():
            made[f"reward.functions.{number}.{key}"] = part
    return made


_REWARD_MODEL_SWITCHES = ("reward_model.enable", "reward.reward_model.enable")


def reward_model_(value: Any, run: Imported, row: Alias) -> Any:
    if run.source.framework == "verl" and not run.given(*_REWARD_MODEL_SWITCHES):
        raise Nothing("reward_model.enable is off")
    return value


def overlong_(value: Any, run: Imported, row: Alias) -> Any:
    names = (
        "overlong_penalty_factor",
        "overlong_buffer_cfg.penalty_factor",
        "overlong_buffer.penalty_factor",
    )
    if value is None or run.given("overlong_buffer_cfg.enable", "overlong_buffer.enable") is False:
        return None
    entry = f"reward.functions.{sum(key.endswith('.fn') for key in run.values)}"
    return Keys({f"{entry}.fn": "overlong", f"{entry}.weight": float(run.given(*names, default=1)),
                 f"{entry}.args": {"buffer_tokens": value}})  # fmt: skip


# The learning rule


def highest_ratio_(value: Any, run: Imported, row: Alias) -> Any:
    if value is None or run.key("algorithm.loss") != "cispo":
        return value
    run.warn(f"epsilon_high {value} is the largest ratio of cispo there; here it is 1 + "
             "algorithm.clip_high, and clip_low 1 sets no smallest.")  # fmt: skip
    return Keys({"algorithm.clip_high": value - 1, "algorithm.clip_low": 1.0})


def _kl(coef: Any, placement: str) -> Keys:
    return Keys({_COEF: coef, _PLACEMENT: placement}) if coef else Keys({_COEF: 0.0})


def placed_kl_(value: Any, run: Imported, row: Alias) -> Any:
    in_loss = run.given("algo.kl.use_loss", "use_kl_loss", default=False)
    return _kl(value, "loss" if in_loss else "reward")


def kl_in_loss_(value: Any, run: Imported, row: Alias) -> Any:
    if not run.given("use_kl_loss", default=False):
        raise Nothing("use_kl_loss is off: there is no KL term in the loss")
    return _kl(value, "loss")


def kl_in_reward_(value: Any, run: Imported, row: Alias) -> Any:
    is_on = run.given("use_kl_in_reward", default=run.source.framework == "relax")
    if not is_on or not value:
        raise Nothing("there is no KL term in rewards")
    if run.key(_COEF) > 0:
        raise NotServed(
            "a KL term in loss and rewards at once; algorithm.kl.placement is one of them"
        )
    return _kl(value, "reward")


def penalty_of_rewards_(value: Any, run: Imported, row: Alias) -> Any:
    return Keys(_kl(value, "reward") | ({"algorithm.kl.estimator": "k1"} if value else {}))


def estimator_(value: Any, run: Imported, row: Alias) -> Any:
    names = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
    made = names.get(str(value).removesuffix("+"))
    if made is None:
        raise NotServed(f"the estimator {value}; there are k1, k2 and k3")
    if made == "k1" and run.key(_PLACEMENT) == "loss":
        run.warn("the KL estimator k1 has an expected gradient of 0 in the loss; k3 is taken (k2 "
                 "has the gradient of the reverse KL).")  # fmt: skip
        return "k3"
    if str(value).endswith("+") and made != "k2":
        run.warn(f"{value} has the value of {made} and the gradient of k2; k2 has both here.")
        return "k2"
    return made


def openrlhf_correction_(value: Any, run: Imported, row: Alias) -> Any:
    """Correction of OpenRLHF: in 0.11 by level and mode, before by a flag and a type, or
    use_icepop."""
    if value in (False, "off", None):
        return "none"
    kind = run.given("vllm_is_correction_type", "is_correction_type", default="tis")
    if value is True:
        kind = "icepop" if run.given("use_icepop") else kind
    elif value == "token":
        kind = "icepop" if run.given("is_correction_mode", default="mask") == "mask" else "tis"
    elif value == "seq":
        kind = "sequence_mask"
    return {"seq-mask-tis": "sequence_mask"}.get(kind, kind)


def verl_correction_(value: Any, run: Imported, row: Alias) -> Any:
    if value in (None, -1):
        return None
    if isinstance(value, int | float):
        return Keys({_KIND: "tis", "algorithm.correction.high": value})
    if value == "sequence":
        raise NotServed(
            "weights of whole sequences; tis and icepop weigh tokens, sequence_mask drops sequences"
        )
    return "icepop" if "_" in str(run.given("rollout_is_threshold", default=2.0)) else "tis"


def correction_range_(value: Any, run: Imported, row: Alias) -> Any:
    if run.key(_KIND) == "none":
        raise Nothing("nothing is corrected")
    bounds = [
        float(part) for part in (value.split("_") if isinstance(value, str) else _list(value))
    ]
    made = Keys({"algorithm.correction.high": bounds[-1]})
    if len(bounds) == 2 and run.key(_KIND) != "tis":
        made["algorithm.correction.low"] = bounds[0]
    elif len(bounds) == 2:
        run.warn(
            f"ratios below {bounds[0]} are raised to it there; tis cuts from above alone here."
        )
    return made


def trl_correction_(value: Any, run: Imported, row: Alias) -> Any:
    if not value or not run.given("use_vllm", default=False):
        raise Nothing(
            "nothing is corrected" if not value else "the trainer's own model samples there"
        )
    names = {"token_truncate": "tis", "token_mask": "icepop", "sequence_mask": "sequence_mask"}
    mode = run.given("vllm_importance_sampling_mode", default="sequence_mask")
    if mode not in names:
        raise NotServed(f"the correction {mode}; there are {', '.join(names.values())}")
    if mode == "sequence_mask":
        run.warn("sequence_mask goes by the ratio of a whole sequence, a product, there, and by "
                 "the mean of its tokens' here.")  # fmt: skip
    return names[mode]


def preference_loss_(value: Any, run: Imported, row: Alias) -> Any:
    losses = _texts(value)
    weights = run.given("loss_weights") or [1.0] * len(losses)
    return losses[0] if len(losses) == 1 else dict(zip(losses, weights, strict=True))


def optimizer_(value: Any, run: Imported, row: Alias) -> Any:
    name = str(value).lower()
    if "8bit" in name:
        run.warn(
            f"{value}: moments of 8 bits there; trainer.optimizer.state_dtype bfloat16 has 16."
        )
    if name != "muon" and "adam" not in name:
        raise NotServed(f"the optimizer {value}; there are adamw and muon")
    return "muon" if name == "muon" else "adamw"


def betas_(value: Any, run: Imported, row: Alias) -> Any:
    if isinstance(value, list):
        return value
    usual = (0.9, 0.999)
    return [run.given(f"adam_beta{number}", default=usual[number - 1]) for number in (1, 2)]


# Memory and devices


def recompute_(value: Any, run: Imported, row: Alias) -> Any:
    """Megatron's method and number of layers are part of ours."""
    method, number = run.given("recompute_method"), run.given("recompute_num_layers", default=1)
    is_plain = value != "full" or method is None or (method, str(number)) == ("uniform", "1")
    return (value or None) if is_plain else f"{method}:{number}"


def engines_(value: Any, run: Imported, row: Alias) -> Any:
    """Number of engines. OpenRLHF's have their own devices in asynchronous training, whatever is
    colocated."""
    if not value or (run.given(*_COLOCATED) and not run.given("train.async_enable", "async_train")):
        raise Nothing("each training process has an engine on its device")
    return value


_ROLES: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "cluster.num_references": ("ref", "the reference", ("train.colocate_actor_ref",
                                                        "colocate_actor_ref")),
    "cluster.num_critics": ("critic", "the critic", ()),
    "cluster.num_reward_models": ("reward", "the reward model", ("train.colocate_critic_reward",
                                                                 "colocate_critic_reward")),
}  # fmt: skip
"""By hone's key: the beginning of their names, the role, and the settings that colocate it."""


def role_devices_(value: Any, run: Imported, row: Alias) -> Any:
    """Devices of a model that is not colocated with the policy."""
    role, what, shares = _ROLES[row.to[0]]
    if run.given(*_COLOCATED):
        raise Nothing(f"{what} shares the devices of the policy")
    if run.given(*shares):
        if role == "reward":
            run.warn("the reward model shares the critic's devices there; here it is colocated "
                     "with the engines, or on the first trainer's device.")  # fmt: skip
        raise Nothing(f"{what} shares another model's devices")
    names = (f"{role}.num_nodes", f"{role}_num_nodes")
    if run.source.framework == "verl":
        pools = ("reward_model.enable_resource_pool", "reward.reward_model.enable_resource_pool")
        if not run.given(*pools):
            raise Nothing(f"{what} shares the devices of the policy")
        names = ("reward_model.nnodes", "reward.reward_model.nnodes")
    number = math.prod(_list(value)) * run.given(*names, default=1)
    if number > 1 and role != "critic":
        run.warn(f"{what} is divided over {number} devices there; here each of them holds a whole "
                 f"copy ({row.to[0]}), and fewer may do.")  # fmt: skip
    return number


def engine_devices_(value: Any, run: Imported, row: Alias) -> Any:
    is_verl = run.source.framework == "verl"
    if run.given(*_COLOCATED) or (is_verl and run.source.program in ("main_ppo", "main_dapo")):
        raise Nothing("each training process has an engine on its device")
    size = run.given("rollout_num_gpus_per_engine", "rollout.tensor_model_parallel_size", default=1)
    times = run.given("rollout.nnodes", default=1) if is_verl else 1
    number = math.prod(_list(value)) * times
    return max(1, number // size)


def engine_size_(value: Any, run: Imported, row: Alias) -> Any:
    if not run.key("cluster.num_engines") and run.processes % value:
        raise NotServed(
            f"engines of {value} devices beside {run.processes} trainers, whose number it does not "
            "divide; cluster.num_engines gives them their own"
        )
    return value


def async_(value: Any, run: Imported, row: Alias) -> Any:
    return (
        max(1, run.given("async_queue_size", "openrlhf_async_queue_size", default=1))
        if value
        else None
    )


def trainer_sleep_(value: Any, run: Imported, row: Alias) -> Any:
    if value and run.key("cluster.num_engines"):
        raise Nothing("trainers share their devices with no engine")
    return value


def between_phases_(value: Any, run: Imported, row: Alias) -> Any:
    """Offload settings: verl keeps these tensors on the host except while they are used."""
    if not value:
        return None
    return trainer_sleep_(True, run, row) if run.is_rl else Keys({row.to[-1]: "optimizer"})


# Records


def traced_steps_(value: Any, run: Imported, row: Alias) -> Any:
    return _steps("profile_step", run, (10, 12)) if value else None


def traced_rollouts_(value: Any, run: Imported, row: Alias) -> Any:
    named = run.given("sglang_profile_steps")
    if value and not named and run.given("sglang_profile_step_start") is None:
        raise NotServed("a trace of every rollout; profile.rollout.steps is a list")
    return (
        (_list(named) if named else _steps("sglang_profile_step", run, (0, 0))) if value else None
    )


def _steps(name: str, run: Imported, usual: tuple[int, int]) -> list[int]:
    first = run.given(f"{name}_start", default=usual[0])
    return [*range(first, run.given(f"{name}_end", default=max(first, usual[1])) + 1)]


def run_name_(value: Any, run: Imported, row: Alias) -> Any:
    if value is None or run.is_set("run.dir") or "$" in str(value):
        raise Nothing("the last part of run.dir is the run's name")
    return f"runs/{value}"


_TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")


def trackers_(value: Any, run: Imported, row: Alias) -> Any:
    if run.source.framework in ("openrlhf", "relax"):
        flags = [one.name for one in run.source.given if one.value]
        names = [name for name in _TRACKERS if any(name in flag for flag in flags)]
    else:
        names = [] if value is None else _texts(value)
    for name in names:
        if name not in (*_TRACKERS, "console", "none", "all", "file"):
            run.missing.append(
                (Given("tracker", name, "its own"), f"log.to has {', '.join(_TRACKERS)}")
            )
    return [name for name in _TRACKERS if name in names or "all" in names]


_SEES = re.compile(r"[-_.]vl\b|vlm\d?\b|gemma-?3-(4|12|27)b", re.IGNORECASE)
"""Names of models that read images, of families that hone serves."""
_GIVES_IMAGES = ("data.image_key", "multimodal_keys.image", "data.max_images_per_prompt")
_FREEZES_TOWER = ("freeze_visual_encoder", "freeze_vision_tower", "freeze_vision_model")


def finish(run: Imported) -> None:
    """Values that follow from several others."""
    if run.source.framework == "trl" and run.has("data.chat") and not run.is_set("data.chat"):
        run.warn(
            "Prompts that are texts stay as they are at TRL, and only lists of messages get the "
            "chat template; here both do where the tokenizer has one. Set data.chat to never where "
            "prompts are texts."
        )
    _warn_of_images(run)
    if not run.is_rl:
        return
    if run.source.framework == "verl" and run.is_set("env.path"):
        _warn_of_limits(run)
    if run.is_set("data.eval.0.path"):
        _evaluate_as_in_training(run)
    if not any(key.startswith(_SCORES) for key in run.values):
        run.leave_open("reward.functions.0.fn", "no reward is named that is served")
    if run.key("pipeline.max_staleness") and not run.key("cluster.num_engines"):
        run.to_do.append("cluster.num_engines: engines sample while the trainers train, on devices "
                         "of their own; say how many there are")  # fmt: skip
    if run.is_spread:
        one = Given("training processes", run.processes, "counted")
        run.set("cluster.num_trainers", run.processes, one)
        run.warn(_devices(run))


_AS_IN_TRAINING: Mapping[str, Mapping[str, str]] = {
    "openrlhf": {"max_completion_tokens": "generate_max_len"},
    "verl": {"max_completion_tokens": "data.max_response_length"},
    "relax": {"max_completion_tokens": "rollout_max_response_len",
              "temperature": "rollout_temperature"},
    "trl": {"max_completion_tokens": "max_completion_length", "temperature": "temperature",
            "n_samples_per_prompt": "num_generations"},
}  # fmt: skip
"""By framework: keys of `rollout` that evaluation has too where nothing else is set, and the
setting there."""


def _evaluate_as_in_training(run: Imported) -> None:
    """Sample held-out prompts as the framework does where no setting is for them alone."""
    for name, theirs in _AS_IN_TRAINING[run.source.framework].items():
        value = run.key(f"rollout.{name}")
        held = run.values.get(f"rollout.{name}")
        if not run.is_set(f"eval.{name}"):
            for one in held.given if held else [Given(theirs, value, "")]:
                run.set(f"eval.{name}", value, one)
    if run.source.framework == "trl":
        for one in run.source.given:
            if one.name in ("top_p", "top_k", "min_p") and isinstance(one.value, int | float):
                run.set(f"eval.{one.name}", max(0, one.value), one)


def _warn_of_images(run: Imported) -> None:
    """What other frameworks do with images where nothing is set."""
    if not (run.given(*_GIVES_IMAGES) or _SEES.search(str(run.key("model.path")))):
        return
    if run.given(*_FREEZES_TOWER) is None:
        run.warn("the tower, which reads images, is trained there, and frozen here.")
    if not run.is_set("data.max_image_tokens"):
        run.warn("the model's files say how large an image may be there, and here "
                 f"data.max_image_tokens {run.key('data.max_image_tokens')} does.")  # fmt: skip


def _warn_of_limits(run: Imported) -> None:
    """Limits of episodes whose defaults are not those of verl."""
    if not run.is_set("env.max_turns"):
        run.warn(
            f"turns have no limit there; here an episode has {run.key('env.max_turns')} at most "
            "(env.max_turns)."
        )
    if not run.is_set("env.max_observation_tokens"):
        run.warn(
            "answers of tools are cut to 256 characters there, and here to "
            f"{run.key('env.max_observation_tokens')} tokens (env.max_observation_tokens)."
        )


def _devices(run: Imported) -> str:
    """Number of devices of all roles together, which no framework's script gives."""
    size, engines = run.key("engine.tensor_parallel_size"), run.key("cluster.num_engines")
    parts = {"trainers": run.processes, f"{engines} engines of {size}": engines * size,
             "of the critic": run.key("cluster.num_critics"),
             "of the reference": run.key("cluster.num_references"),
             "of the reward model": run.key("cluster.num_reward_models")}  # fmt: skip
    each = ", ".join(f"{number} ({what})" for what, number in parts.items() if number)
    return f"{sum(parts.values())} devices are needed: {each}."
