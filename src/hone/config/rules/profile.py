"""Rules on what is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from hone.config.rules.rule import error, needs, unused, warning
from hone.config.rules.view import View, fact

__all__ = ["RULES"]


@fact
def on_cpu(view: View) -> bool:
    """Whether the run is on no GPU."""
    return view["run.device"] == "cpu" or view.plan.is_on_cpu


@fact
def lacks_activities(view: View) -> bool:
    """Whether none of the activities that engines shall record is there."""
    return view.number("on_cpu") and "cpu" not in view["profile.rollout.activities"]


def _none_traced(key: str) -> Callable[[View], Iterator[Mapping[str, object]]]:
    def found(view: View) -> Iterator[Mapping[str, object]]:
        last = view["run.steps"] - 1
        if not any(0 <= step <= last for step in view[key]):
            yield {"last": last}

    return found


RULES = (
    error("profile.memory.recorder = torch", given=("@on_cpu",),
          why="it records the memory of GPUs",
          fix="profile.memory.recorder = memray | profile.memory.recorder = none"),
    needs("memray", "profile.memory.recorder = memray",
          by="memray in profile.memory.recorder", instead="profile.memory.recorder = none"),
    error("@lacks_activities", given=("profile.rollout.steps",),
          says="profile.rollout.activities is gpu",
          why="there is no GPU to record", fix="add cpu to profile.rollout.activities"),
    *(warning(key, each=_none_traced(key),
              says=f"{key} is {{{key}}}, and steps are 0 to {{last}}",
              why="they are counted from 0, and run.steps is {run.steps}",
              fix=f"name one of these in {key} | raise run.steps")
      for key in ("profile.train.steps", "profile.rollout.steps")),
    *(warning(f"profile.{key}",
              why="what is traced is slower than it is without, and traces grow",
              fix="use it for a diagnosis alone")
      for key in ("train.with_stack", "train.with_memory", "rollout.with_stack")),
    *(unused(f"profile.{section}.({keys})", f"not profile.{section}.steps",
             instead=f"name steps in profile.{section}.steps")
      for section, keys in (
          ("train", "target|with_stack|with_memory|with_flops"),
          ("rollout", "num_forwards|activities|by_stage|with_stack|record_shapes"))),
    unused("profile.memory.after_steps", "profile.memory.recorder = none",
           instead="profile.memory.recorder = torch"),
)  # fmt: skip
