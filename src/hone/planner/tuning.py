"""What `hone tune` computes: which settings to try, the constants that explain what was measured,
and how large micro-batches are worth their memory.

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
from hone.planner.calibration import ASSUMED, Calibration, Measured, calibrated
from hone.planner.fitting import Change, kept_logits
from hone.planner.search import memory_settings

__all__ = ["LEAST_GAIN", "fit", "modes", "search_budget", "variants"]

LEAST_GAIN = 0.03
"""Of a step; less is noise of a short run."""
_OF_GPUS = (
    *("trainer.offload", "trainer.offload_activations"),
    *("trainer.enable_sleep", "engine.enable_sleep"),
)
_CLOSE = 1.1
"""A budget is found when what fits and what does not are as near."""


def modes(cfg: RLConfig) -> Iterator[Change]:
    """Where engine and trainer share a device: to carry unfinished samples over, and to sample
    ahead, corrected for older weights."""
    is_corrected = cfg.algorithm.correction.kind != "none"
    correction = {} if is_corrected else {"algorithm.correction.kind": "tis"}
    yield {"rollout.oversample_prompts": -(-cfg.rollout.prompts_per_step // 4), **correction}
    yield {"pipeline.max_staleness": 1, **correction}


def variants(plan: RunPlan) -> Iterator[Change]:
    """Single changes that move time or memory and nothing that is learnt."""
    cfg, batch = plan.config, plan.batch
    assert isinstance(cfg, RLConfig)
    assert batch is not None
    if cfg.engine.max_num_seqs < batch.samples_per_step:
        yield {"engine.max_num_seqs": batch.samples_per_step}
    if chunk := kept_logits(plan):
        yield chunk
    for _, *others in memory_settings(plan):
        for change in others:
            if not (plan.is_on_cpu and any(key in _OF_GPUS for key in change)):
                yield change


def fit(assumed: PlanningConfig, measured: Sequence[tuple[RunPlan, Measured]]) -> PlanningConfig:
    """The constants that explain what was measured, each from the phase that it decides about
    (docs/design/tune.md); those of which nothing was measured stay as they are."""
    found: list[Calibration] = []
    for plan, step in measured:
        with suppress(ValueError):  # one that the planner cannot simulate
            found.append(calibrated(plan, step))
    if not found:
        return assumed
    engines_s = median(each.engine_scale for each in found)
    train_s = median(each.train_scale for each in found)
    update = {
        "decode_share": ASSUMED.decode_share / engines_s,
        "prefill_share": ASSUMED.prefill_share / engines_s,
        "decode_overhead_s": ASSUMED.decode_overhead_s * engines_s,
        "training_share": min(ASSUMED.training_share / train_s, 1.0),
        "overhead_s": median(each.rest_s for each in found),
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
    """The budget of tokens that is worth its memory, from `start` tokens, with which a step takes
    `start_s` seconds, to `most`. `measure` gives the seconds of a step, None where memory ends.

    Budgets are doubled until a step is no faster; where memory ends before, the next ones are the
    square root of the last factor larger.
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
