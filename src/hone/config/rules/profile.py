"""Rules on what is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property

from hone.config.rules.facts import Facts
from hone.config.rules.rule import error, needs, unused, warning, with_facts
from hone.config.rules.view import Details

__all__ = ["RULES"]


class ProfileFacts(Facts):
    """The facts that rules on profiles compare."""

    @cached_property
    def on_cpu(self) -> bool:
        """Whether the run is on no GPU."""
        return self["run.device"] == "cpu" or self.plan.is_on_cpu

    @cached_property
    def lacks_activities(self) -> bool:
        """Whether engines are to record GPUs alone, and there are none."""
        return self.on_cpu and "cpu" not in self["profile.rollout.activities"]


def _none_traced(key: str) -> Callable[[ProfileFacts], Iterator[Details]]:
    def found(view: ProfileFacts) -> Iterator[Details]:
        last = view["run.steps"] - 1
        if not any(0 <= step <= last for step in view[key]):
            yield {"last": last}

    return found


RULES = with_facts(
    ProfileFacts,
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
