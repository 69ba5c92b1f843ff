"""Sources that give rows in some steps, or until each of their rows was drawn so often.

A *phase* is a run of draws from the same sources. When a source begins or ends, the shares of all
that give rows are scaled to one, and counting begins anew, so that the bounds of
`hone.data.mixture` hold within each phase. A phase that begins within a step ends with that step:
the next step begins another one, so that whole steps are counted.

Which source comes next is a pure function of the rows drawn and the steps in which they were drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hone.data.mixture import Mixture
from hone.errors import UserError

__all__ = ["Limits", "Phase", "Phases"]


@dataclass(frozen=True, slots=True)
class Limits:
    """When a source gives rows. Without values: always."""

    from_step: int = 1
    """The first step whose rows may come from it."""
    until_step: int | None = None
    """The last such step."""
    max_epochs: int | None = None
    """How often it gives each of its rows, before it ends."""

    def include(self, step: int) -> bool:
        """Whether rows of `step` may come from the source."""
        return self.from_step <= step and (self.until_step is None or step <= self.until_step)


class Phase(NamedTuple):
    """Draws from the same sources."""

    sources: tuple[int, ...]
    """The numbers of these sources, ascending."""
    served: tuple[int, ...]
    """The rows that each source, also of others, had given when the phase began."""
    step: int
    """The step of its last draw."""
    is_of_step: bool
    """Whether it began within a step, and ends with it."""

    def state_dict(self) -> dict[str, Any]:
        return self._asdict()

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Phase:
        """The phase of a `state_dict` that was written as JSON."""
        sources, served = (tuple(map(int, state[name])) for name in ("sources", "served"))
        return cls(sources, served, int(state["step"]), bool(state["is_of_step"]))


class Phases:
    """The phases of several sources, by their relative `weights` and their `limits`."""

    def __init__(self, weights: Sequence[float], limits: Sequence[Limits]) -> None:
        assert len(weights) == len(limits), f"{len(weights)=} {len(limits)=}"
        self.limits = tuple(limits)
        self.weights = tuple(weights)
        self.shares = Mixture(weights).shares
        """Those of a phase of all sources."""
        self._mixtures: dict[tuple[int, ...], Mixture] = {}

    @property
    def first(self) -> Phase:
        """The phase before the first draw, from no source."""
        return Phase((), (0,) * len(self.limits), step=0, is_of_step=False)

    @property
    def unlimited(self) -> Phase:
        """The phase of a run without limits, whatever was drawn so far."""
        return self.first._replace(sources=tuple(range(len(self.limits))))

    def following(
        self, phase: Phase, step: int, served: Sequence[int], ended: Sequence[bool]
    ) -> Phase:
        """The phase of the next draw, for `step`, where sources have given `served` rows, and those
        that have `ended` have none left. Raises UserError where no source gives rows."""
        sources = tuple(
            number
            for number, (limits, has_ended) in enumerate(zip(self.limits, ended, strict=True))
            if limits.include(step) and not has_ended
        )
        if not sources:
            raise UserError(
                f"no source of data.train has rows for step {step}: leave until_step and "
                "max_epochs of one unset"
            )
        is_same_step = step == phase.step
        if sources == phase.sources and (is_same_step or not phase.is_of_step):
            return phase._replace(step=step)
        return Phase(sources, tuple(served), step, is_of_step=is_same_step)

    def next_source(self, phase: Phase, served: Sequence[int]) -> int:
        """The source of the next row of a phase, where all sources have given `served` rows."""
        since = [served[number] - phase.served[number] for number in phase.sources]
        return phase.sources[self._mixture(phase.sources).next_source(since)]

    def shares_of(self, phase: Phase) -> dict[int, float]:
        """The shares (0 to 1) of the sources of a phase, by their numbers."""
        shares = self._mixture(phase.sources).shares
        return dict(zip(phase.sources, map(float, shares), strict=True))

    def _mixture(self, sources: tuple[int, ...]) -> Mixture:
        if sources not in self._mixtures:
            self._mixtures[sources] = Mixture([self.weights[number] for number in sources])
        return self._mixtures[sources]
