"""Computations of `hone tune`: the settings to try, the fit of constants to measurements, and the
search for the best size of micro-batches.

    changes = [*variants(plan)]
    assumed = fit(assumed, [(plan, measured), ...])
    search_budget(measure, start=16384, start_s=3.6, most=60000)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from statistics import median

from hone.config.plan import RunPlan
from hone.config.planning import PlanningConfig
from hone.config.tree import RLConfig
from hone.planner.knobs import LOGITS, SEARCHED, SEQUENCES, Change, choices_that_differ
from hone.tools.plan.calibration import ASSUMED, Calibration, Measured, calibrated

__all__ = ["LEAST_GAIN", "fit", "modes", "search_budget", "variants"]

LEAST_GAIN = 0.03
"""Smallest share of a step's time that counts as a difference; less is noise of a short run."""
_CLOSE = 1.1
"""Ratio between a budget that fails and one that fits at which the search ends."""


def modes(cfg: RLConfig) -> Iterator[Change]:
    """Other modes of a run whose engine and trainer share a device: carry-over of unfinished
    samples, and sampling ahead with a correction for older weights."""
    is_corrected = cfg.algorithm.correction.kind != "none"
    correction = {} if is_corrected else {"algorithm.correction.kind": "tis"}
    yield {"rollout.oversample_prompts": -(-cfg.rollout.prompts_per_step // 4), **correction}
    yield {"pipeline.max_staleness": 1, **correction}


def variants(plan: RunPlan) -> Iterator[Change]:
    """Single changes of time or memory that do not change the training method."""
    yield from SEQUENCES.time(plan)
    yield from LOGITS.time(plan)
    for knob in SEARCHED:
        _, *others = choices_that_differ(knob, plan)
        yield from others


def fit(assumed: PlanningConfig, measured: Sequence[tuple[RunPlan, Measured]]) -> PlanningConfig:
    """The constants that fit the measurements, each from the phase that depends on it
    (docs/design/tune.md); a constant without a measurement stays unchanged."""
    calibrations: list[Calibration] = []
    for plan, step in measured:
        with suppress(ValueError):  # one that the planner cannot simulate
            calibrations.append(calibrated(plan, step))
    if not calibrations:
        return assumed
    engines_s = median(each.engine_scale for each in calibrations)
    train_s = median(each.train_scale for each in calibrations)
    update = {
        "decode_share": ASSUMED.decode_share / engines_s,
        "prefill_share": ASSUMED.prefill_share / engines_s,
        "decode_overhead_s": ASSUMED.decode_overhead_s * engines_s,
        "training_share": min(ASSUMED.training_share / train_s, 1.0),
        "overhead_s": median(each.rest_s for each in calibrations),
    }
    if shared := [step.sync_s for plan, step in measured if not plan.is_apart]:
        update["switch_s"] = median(shared)
    rates = [
        plan.shape.weight_bytes(plan.num_bytes) / step.sync_s
        for plan, step in measured
        if plan.is_apart and plan.shape is not None and step.sync_s > 0
    ]
    if rates:
        update["sync_bytes_per_s"] = median(rates)
    return assumed.model_copy(update=update)


def search_budget(
    measure: Callable[[int], float | None], *, start: int, start_s: float, most: int
) -> int:
    """The token budget with the fastest steps, between `start` tokens, with which a step takes
    `start_s` seconds, and `most`. `measure` gives the seconds of a step, None after an
    out-of-memory error.

    Budgets are doubled until a step is no faster; after an out-of-memory error the factor of growth
    is replaced by its square root.
    """
    best, best_s, fits, factor, has_ended = start, start_s, start, 2.0, False
    while fits < most and factor > _CLOSE:
        budget = min(int(factor * fits), most)
        seconds = measure(budget)
        if seconds is None:
            has_ended, most = True, budget - 1
        elif seconds < (1 - LEAST_GAIN) * best_s:
            best, best_s, fits = budget, seconds, budget
        elif has_ended:
            fits = budget
        else:
            break
        if has_ended:
            factor **= 0.5
    return best
