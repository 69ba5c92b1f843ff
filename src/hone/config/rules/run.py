"""Rules on the course of a run: resuming, evaluation, checkpoints, records."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import get_args

from hone.config.rules.facts import Facts
from hone.config.rules.rule import error, needs, unused, warning, with_facts
from hone.config.rules.view import Details
from hone.config.run import EvaluationConfig, Tracker
from hone.config.tree import SUPERVISED
from hone.rewards.settings import BUILTIN_REWARDS, REWARD_MODEL, RewardFunctionConfig

__all__ = ["RULES"]


class RunFacts(Facts):
    """The facts that rules on the course of a run compare."""

    @cached_property
    def has_rows_to_evaluate(self) -> bool:
        """Whether there is anything to evaluate on."""
        return bool(self["data.eval"]) or self["data.eval_fraction"] > 0

    @cached_property
    def unranked_metric(self) -> bool:
        """Whether the metric that ranks checkpoints is none of an evaluation."""
        return self.evaluates and not self["eval.metric"].startswith("eval/")


def _passing(view: RunFacts) -> Iterator[Details]:
    """Names of the reward functions, where the one that lets samples pass is none of them, nor the
    environment."""
    name, names = view["eval.pass_function"], view["reward"].names
    if view["env.path"] is not None or view["env.harness.command"] is not None:
        names = ["env", *names]
    if view["reward.model.path"] is not None:
        names = [*names, REWARD_MODEL]
    if name is not None and name not in names:
        yield {"names": ", ".join(names) or "none"}


def _passing_unknown(view: RunFacts) -> Iterator[Details]:
    """Why no sample will be said to pass, as far as the reward functions tell before they run."""
    reward = view["reward"]
    if view["env.path"] is not None or view["env.harness.command"] is not None:
        return
    counted = [
        (name, entry)
        for name, entry in zip(reward.names, reward.functions, strict=True)
        if entry.weight > 0 and entry.fn != "overlong"
    ]
    shaped = [name for name, entry in counted if _is_shaped(entry)]
    if shaped:
        yield {"problem": f"{shaped[0]} gives more than right and wrong"}
    elif not counted:
        yield {"problem": "no function of positive weight says whether an answer is right"}


def _is_shaped(entry: RewardFunctionConfig) -> bool:
    """Whether a built-in is known to give other scores than 0 and 1."""
    has_parts = entry.fn == "code_tests" and bool(entry.args.get("partial_credit"))
    return has_parts or entry.fn in ("length", "judge")


def _never_passing(view: RunFacts) -> Iterator[Details]:
    """The most that the function gives, where that is less than the threshold."""
    evaluation: EvaluationConfig = view["eval"]
    reward, name = view["reward"], evaluation.pass_function
    if name not in reward.names:
        return
    fn = reward.functions[reward.names.index(name)].fn
    highest = 0.0 if fn == "overlong" else 1.0
    if fn in BUILTIN_REWARDS and fn != "judge" and highest < evaluation.pass_threshold:
        yield {"highest": f"{highest:g}"}


RULES = with_facts(
    RunFacts,
    error("run.resume < 0", fix="write auto | never | the number of a step"),
    error("run.resume >= run.steps", why="nothing is left to do",
          fix="raise run.steps | resume from an earlier step"),
    # Evaluation.
    error("eval.(every_n_steps|at_start) is set", "not @has_rows_to_evaluate",
          says="{meant} is set, and there is nothing to evaluate on",
          why="data.eval is empty and data.eval_fraction is 0",
          fix="set one of the two | remove {meant}"),
    *(warning(rows, "not @evaluates",
              says=f"{rows} sets rows aside, and nothing evaluates",
              why="eval.every_n_steps is 0, and eval.at_start is off",
              fix="set one of these", given=given)
      for rows, given in (("data.eval", ()), ("data.eval_fraction", ("not data.eval",)))),
    error("@unranked_metric",
          says="eval.metric is {eval.metric}",
          why="metrics of an evaluation begin with eval/",
          fix="eval.metric = eval/reward/mean"),
    unused("eval.pass_threshold", "eval.pass_function = unset", given=("@evaluates",),
           instead="name the reward function whose score it is for in eval.pass_function"),
    warning("eval.pass_function = unset", given=("@evaluates",), each=_passing_unknown,
            only=("rl", "eval"), why="{problem}, so that pass@k is not reported",
            fix="set it to the function that decides whether an answer is right, and "
            "eval.pass_threshold to its lowest score that counts as right"),
    error("eval.pass_function", given=("@evaluates",), each=_passing,
          why="reward.functions has {names}", fix="name one of them"),
    warning("eval.pass_threshold", "eval.pass_function", given=("@evaluates",),
            each=_never_passing,
            why="it gives at most {highest}, so that no sample can pass",
            fix="eval.pass_threshold = {highest}"),
    # Checkpoints and records.
    warning("checkpoint.every_n_steps > run.steps", given=("checkpoint.every_n_steps is set",),
            why="only the end is saved, and a crash loses everything",
            fix="lower checkpoint.every_n_steps"),
    unused("log.samples_per_step", only=SUPERVISED, why="nothing is sampled"),
    *(needs(name, f"log.to has {name}", by=f"{name} in log.to", instead="remove it")
      for name in get_args(Tracker)),
)  # fmt: skip
