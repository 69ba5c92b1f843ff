"""Rules on the steps and epochs in which sources give rows."""

from __future__ import annotations

from collections.abc import Iterator

from hone.config.rules.facts import Facts
from hone.config.rules.rule import error, warning, with_facts
from hone.config.rules.view import Details
from hone.config.tree import SUPERVISED
from hone.data.settings import SourceConfig

__all__ = ["RULES"]

_TRAINS = ("rl", *SUPERVISED)


def _without_rows(view: Facts) -> Iterator[Details]:
    """The first step in which every source of `data.train` may have ended."""
    sources: tuple[SourceConfig, ...] = view["data.train"]
    endless = [source for source in sources if source.max_epochs is None]
    ends = [source.until_step for source in endless if source.until_step is not None]
    for step in (1, *sorted(end + 1 for end in ends)):
        if sources and not any(_gives_rows(source, step) for source in endless):
            yield {"step": step}
            return


def _gives_rows(source: SourceConfig, step: int) -> bool:
    return source.from_step <= step and (source.until_step is None or step <= source.until_step)


def _ends_before_it_begins(view: Facts) -> Iterator[Details]:
    for index, source in enumerate(view["data.train"]):
        if source.until_step is not None and source.until_step < source.from_step:
            yield {"key": f"data.train.{index}", "first": source.from_step,
                   "last": source.until_step}  # fmt: skip


def _begins_after_the_run(view: Facts) -> Iterator[Details]:
    for index, source in enumerate(view["data.train"]):
        if source.from_step > view["run.steps"]:
            yield {"key": f"data.train.{index}", "first": source.from_step}


RULES = with_facts(
    Facts,
    error(each=_without_rows, only=_TRAINS,
          says="data.train has no source that is sure to have rows for step {step}",
          why="those with max_epochs may have ended by then, and the steps of the others leave it "
          "out",
          fix="leave max_epochs, from_step and until_step of one source unset | have sources "
          "without max_epochs follow each other without a gap, the last one without until_step"),
    error(each=_ends_before_it_begins, only=_TRAINS,
          says="{key}.until_step is {last}, before {key}.from_step = {first}",
          why="no row of the source would be drawn",
          fix="raise {key}.until_step | lower {key}.from_step | remove the source"),
    warning(each=_begins_after_the_run, only=_TRAINS,
            says="{key}.from_step is {first}, and run.steps is {run.steps}",
            why="no row of the source is drawn",
            fix="lower {key}.from_step | raise run.steps | remove the source"),
)  # fmt: skip
