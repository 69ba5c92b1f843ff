"""`hone tune RECIPE [flags]`: measure the best of `hone plan` on this machine.

docs/design/tune.md says what flows where.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from signal import SIGHUP, SIGTERM
from statistics import fmean, median, pstdev
from typing import NamedTuple

import numpy as np

from hone.cli.arguments import take_number
from hone.cli.command import check_plan, load_arguments, local_gpu, plan_here, take_nproc
from hone.cli.help import is_help, print_help
from hone.cli.main import main
from hone.config.plan import RunPlan
from hone.config.planning import LengthsConfig, PlanningConfig
from hone.config.recipe import to_yaml
from hone.config.rules.files import unwritable
from hone.config.tree import PlanConfig, RLConfig
from hone.distributed.signals import raising
from hone.errors import UserError
from hone.hardware import max_gpus
from hone.observe.whole_file import write_whole
from hone.planner.fitting import changed, does_fit, rl_config
from hone.planner.host_memory import host_roles
from hone.planner.knobs import LOGITS, Change
from hone.planner.recompute import settled
from hone.planner.run_memory import peak_bytes
from hone.tools.plan.calibration import Measured, simulated
from hone.tools.plan.comparison import (
    changed_settings,
    compare,
    launch_words,
    planned_config,
    recipe_of,
)
from hone.tools.plan.lengths import draw_lengths
from hone.tools.plan.short_runs import OUT_OF_MEMORY, Candidate, Result, ShortRuns
from hone.tools.plan.tuning import LEAST_GAIN, fit, modes, search_budget, variants
from hone.version import __version__

__all__ = ["Search", "run"]

_USAGE = """\
usage: hone tune RECIPE [--nproc N] [--section.key VALUE ...]
                 [--candidates N] [--steps-each N] [--output FILE.yaml]

Runs a recipe of `hone rl` on this machine in the ways that `hone plan` finds
best, a few steps each, and writes the fastest as a recipe, with the table of
what was predicted and measured. One that runs out of memory or dies is listed
with its reason. After each, the constants of the planner are fitted to what was
measured, and say what to measure next. Then the micro-batches of the fastest
grow until memory ends or a step is no faster.

  --candidates N        ways that are measured at most, with the recipe as it is
                        (8); none that is predicted to be a tenth slower
  --steps-each N        steps that count, after two that do not (4)
  --output FILE.yaml    the recipe (tuned.yaml beside the results)

Results are kept beside run.dir, in a folder of its name and -tune: the same
command goes on after Ctrl-C, which prints the table so far, and measures
nothing twice. Takes the flags of `hone plan` as well: --plan.goal on_policy
tries no modes whose samples are older than the weights. What is learnt stays
the recipe's, but for such modes, which are corrected as `hone plan` does it. On
GPUs all of this host are used, or with --nproc so many; on a CPU as many
processes as given.

examples:
  hone tune gsm8k --model.path Qwen/Qwen3-0.6B --output tuned.yaml
  hone tune quickstart-rl --candidates 4 --steps-each 3
"""

_FITTED = (
    "decode_share",
    "decode_overhead_s",
    "prefill_share",
    "training_share",
    "overhead_s",
    "switch_s",
    "sync_bytes_per_s",
)
_BUDGET = "trainer.max_tokens_per_microbatch"
_GIB = 2**30
_HOPELESS = 0.9
"""Share of the fastest run's tokens/s: candidates predicted to be below are not measured."""
_log = logging.getLogger(__name__)


def run(argv: Sequence[str]) -> int:
    """Run `hone tune`: measure, fit, and write the fastest candidate."""
    if not argv or is_help(argv):
        if any(not word.startswith("-") for word in argv):
            return print_help("plan", argv)
        sys.stdout.write(_USAGE)
        return 0
    nproc, words = take_nproc(argv)
    num_candidates, words = take_number("--candidates", words, 8)
    num_steps, words = take_number("--steps-each", words, 4)
    cfg, notes = load_arguments(PlanConfig, words, starts=True)
    folder = cfg.run.dir.with_name(f"{cfg.run.dir.name}-tune")
    output = cfg.output or folder / "tuned.yaml"
    _require_usable(cfg, output)
    for note in notes:
        _log.info("note: %s", note)
    # The recipe's own folder may hold a run already.
    elsewhere = cfg.run.model_copy(update={"dir": folder / "run"})
    cfg = cfg.model_copy(update={"run": elsewhere})
    with raising(_ended_by, SIGTERM, SIGHUP):
        gpu = local_gpu()
        runs = ShortRuns(folder, num_steps, main=main, gpu=None if gpu is None else gpu.name)
        search = Search(cfg, nproc, runs, num_candidates)
        try:
            search.measure_best()
            best = search.raise_budget()
        except KeyboardInterrupt:
            sys.stdout.writelines(f"{line}\n" for line in search.report())
            raise
    lines = search.report()
    head = [f"{best.name}: the fastest of `hone tune` {__version__}", *lines]
    comments = "".join(f"# {line}\n" for line in head)
    write_whole(output, f"{comments}{to_yaml(recipe_of(best.cfg))}", "output")
    sys.stdout.writelines(f"{line}\n" for line in lines)
    processes = f" --nproc {best.nproc}" * (best.nproc > 1)
    _log.info("to run the fastest, %s: hone rl %s%s", best.name, output, processes)
    return 0


class _Predicted(NamedTuple):
    seconds: tuple[float, ...]
    """Seconds of a step, sampling, training, and weight sync."""
    tokens_per_s: float


def _ended_by(number: int) -> SystemExit:
    return SystemExit(128 + number)


class Search:
    """Search over candidates for one recipe, of which `number` are measured."""

    def __init__(
        self,
        cfg: PlanConfig,
        nproc: int | None,
        measure: Callable[[Candidate], Result],
        number: int,
    ) -> None:
        self._cfg, self._measure, self._number = cfg, measure, number
        self.results: dict[str, tuple[Candidate, Result]] = {}
        """Measured candidates by name, in order of measurement."""
        self._constants: dict[bool, PlanningConfig] = {}
        base = self._candidate(cfg, nproc or 1)
        if base.plan.shape is None:
            raise UserError("model.path: the sizes of this model are not known before it is loaded")
        result = self._take(base, _refusal(base))
        if result.reason not in ("", OUT_OF_MEMORY) and does_fit(base.plan):
            raise UserError(result.reason)  # no other candidate would run either
        step = result.step
        if step is not None:
            self._cfg = cfg.model_copy(update={"plan": _with_lengths(cfg.plan, step)})
        self._lengths = _drawn_lengths(cfg) if step is None else step.lengths
        # Otherwise the first run calibrates the constants.
        is_known = base.plan.devices.gpu is not None
        self._assumed = self._cfg.plan if is_known else self._fitted(base.plan)
        self.candidates = {base.name: base}
        for way, processes in self._ways(base, nproc):
            candidate = self._candidate(way, processes)
            self.candidates.setdefault(candidate.name, candidate)

    def measure_best(self) -> None:
        """Measure the best candidates by the constants fitted so far, until there are enough."""
        while len(self.results) < self._number:
            left = [x for x in self._ranked(self._fitted) if x not in self.results]
            served = (x for x in left if not _refusal(self.candidates[x]))
            if (name := next(served, None)) is None or self._is_hopeless(name):
                break
            self._take(self.candidates[name])

    def raise_budget(self) -> Candidate:
        """The fastest candidate, with the token budget of micro-batches that is worth its memory.
        Raises UserError if nothing could be measured."""
        if not self._measured():
            reasons = "; ".join(f"{x.name}: {result.reason}" for x, result in self.results.values())
            raise UserError(f"no way to run this recipe here could be measured. {reasons}")
        first, *_ = measured = self._measured()
        best, step, rate = max(measured, key=lambda found: found[2])
        if rate < (1 + LEAST_GAIN) * first[2]:  # a smaller gain may be noise
            best, step, rate = first
        axes, batch = best.plan.policy.axes, best.plan.batch
        assert batch is not None
        if best.cfg.trainer.micro_batch_size is not None:
            return best
        found: dict[int, Candidate] = {}

        keeps_logits = next(LOGITS.time(best.plan), None) is None

        def seconds(budget: int) -> float | None:
            larger = _changed(best.cfg, best.nproc, {_BUDGET: budget})
            if keeps_logits:
                chunk = next(LOGITS.time(self._candidate(larger, best.nproc).plan), {})
                larger = _changed(larger, best.nproc, chunk)
            found[budget] = self._candidate(larger, best.nproc)
            larger_step = self._take(found[budget], _refusal(found[budget])).step
            return None if larger_step is None else larger_step.step_s

        row_tokens = step.num_prompt_tokens + fmean(chain.from_iterable(step.lengths))
        num_tokens = batch.samples_per_step * row_tokens / batch.optimizer_steps_per_rollout
        budget = search_budget(
            seconds,
            start=best.cfg.trainer.max_tokens_per_microbatch,
            start_s=step.step_s,
            most=int(1.1 * num_tokens / (axes.data * axes.context)),
        )
        return found.get(budget, best)

    def report(self) -> list[str]:
        """Lines on the measurements so far."""
        return [*self.table(), *self.summary()] if self._measured() else []

    def table(self) -> Iterator[str]:
        """Table of measured times and predictions with the fitted constants, fastest first."""
        yield "measured, predicted by the fitted constants:"
        names = ("s/step", "sampling", "training", "weights", "GiB", "tok/s")
        yield "".join(f"{name:>16}" for name in names)
        for x, result in sorted(self.results.values(), key=lambda pair: -pair[1].tokens_per_s):
            yield f"{x.name}{f': {result.reason}' if result.reason else ''}"
            if (step := result.step) is None:
                continue
            train_s = step.step_s - step.wait_s - step.sync_s
            ours = (step.step_s, step.wait_s, train_s, step.sync_s, result.peak_gib)
            theirs = (*self._predict(self._fitted(x.plan), x.plan).seconds, _predicted_gib(x))
            cells = [f"{a:.3f}, {b:.3f}" for a, b in zip(ours, theirs, strict=True)]
            yield "".join(f"{cell:>16}" for cell in [*cells, f"{result.tokens_per_s:,.0f}"])

    def summary(self) -> Iterator[str]:
        """Errors before and after the fit, the planner's choice, and the constants."""
        measured = self._measured()
        rates = {x.name: rate for x, _, rate in measured if x.name in self.candidates}
        for when, constants in (("before", lambda _: self._assumed), ("after", self._fitted)):
            steps = [
                (self._predict(constants(x.plan), x.plan).seconds[0], step.step_s)
                for x, step, _ in measured
            ]
            pick = next(name for name in self._ranked(constants) if name in rates)
            regret = max(rates.values()) / rates[pick] - 1
            yield (
                f"{when} the fit predicted steps are {_off(steps)}; the pick is {regret:.1%} "
                f"behind the best measured: {pick}"
            )
        peaks = [(_predicted_gib(x), self.results[x.name][1].peak_gib) for x, *_ in measured]
        yield f"predicted memory is {_off(peaks)}"
        if measured[0][0].plan.devices.gpu is not None:
            fitted = fit(self._cfg.plan, [(x.plan, step) for x, step, _ in measured])
            flags = " ".join(f"--plan.{name} {getattr(fitted, name):.4g}" for name in _FITTED)
            yield f"for `hone plan` of such machines: {flags}"

    def _measured(self) -> list[tuple[Candidate, Measured, float]]:
        """Measured candidates with their tokens/s."""
        found = self.results.values()
        return [(x, y.step, y.tokens_per_s) for x, y in found if y.step is not None]

    def _fitted(self, plan: RunPlan) -> PlanningConfig:
        """Constants fitted to the measurements, of runs of this kind if there are any: engines that
        sample while the trainer trains may take cores from it."""
        if plan.is_apart not in self._constants:
            found = [(x.plan, step) for x, step, _ in self._measured()]
            alike = [x for x in found if x[0].is_apart == plan.is_apart]
            self._constants[plan.is_apart] = fit(self._cfg.plan, alike or found)
        return self._constants[plan.is_apart]

    def _is_hopeless(self, name: str) -> bool:
        """Whether this candidate and all below it are predicted to be far slower than the
        fastest."""
        fastest = max((rate for *_, rate in self._measured()), default=0.0)
        plan = self.candidates[name].plan
        return self._predict(self._fitted(plan), plan).tokens_per_s < _HOPELESS * fastest

    def _candidate(self, cfg: PlanConfig, nproc: int) -> Candidate:
        changes = changed_settings(self._cfg, cfg)
        words = [f"{nproc} processes"] * (nproc > 1)
        words += [f"{key} {json.dumps(value)}".replace('"', "") for key, value in changes.items()]
        name = ", ".join(words) or "the recipe as it is"
        return Candidate(name, cfg, nproc, _plan(rl_config(cfg), nproc))

    def _ways(self, base: Candidate, nproc: int | None) -> Iterator[tuple[PlanConfig, int]]:
        """The outcomes of `hone plan` for this host if its table has the GPU, otherwise the modes
        of one device; and other single settings of each."""
        cfg, gpu = self._cfg, base.plan.devices.gpu
        starts = [(cfg, base.nproc)]
        if gpu is None:
            starts += [(_changed(cfg, base.nproc, mode), base.nproc) for mode in modes(cfg)]
        else:
            number = nproc or max_gpus(os.environ.get("CUDA_VISIBLE_DEVICES")) or 1
            planning = cfg.plan.model_copy(update={"gpus": number, "gpu": gpu.name})
            for outcome in compare(cfg.model_copy(update={"plan": planning})).outcomes:
                if launch_words(outcome) == ["hone", "rl"]:
                    is_used = outcome.plan.cluster.is_used  # which says how many there are
                    processes = 1 if is_used else outcome.run.placement.num_trainers
                    starts.append((planned_config(cfg, outcome), processes))
        for start, processes in starts[: self._number]:
            for change in ({}, *variants(settled(_plan(start, processes)))):
                way = _changed(start, processes, change)
                is_old = way.pipeline.samples_ahead or way.rollout.oversample_prompts > 0
                if not (is_old and cfg.plan.goal == "on_policy"):
                    yield way, processes

    def _take(self, candidate: Candidate, refusal: str = "") -> Result:
        _log.info("%d: %s", len(self.results) + 1, candidate.name)
        result = Result(reason=refusal) if refusal else self._measure(candidate)
        self.results[candidate.name] = candidate, result
        self._constants.clear()
        if result.step is None:
            _log.warning("  %s", result.reason)
        else:
            rate = f"{result.tokens_per_s:,.0f}"
            _log.info("  %.3g s a step, %s tok/s", result.step.step_s, rate)
        return result

    def _predict(self, constants: PlanningConfig, plan: RunPlan) -> _Predicted:
        try:
            run = simulated(constants, plan, self._lengths, self._cfg.plan.prompt_tokens)
        except ValueError:  # predicted: the cache is too small for one sample
            return _Predicted((math.nan,) * 4, 0.0)
        phases = [(x.wait_s, x.train_s, x.halt_s + x.sync_s) for x in run.steady]
        means = (fmean(phase) for phase in zip(*phases, strict=True))
        return _Predicted((run.step_s, *means), run.tokens_per_s)

    def _ranked(self, constants: Callable[[RunPlan], PlanningConfig]) -> list[str]:
        """Names of candidates, fastest first."""
        rates = {
            name: self._predict(constants(x.plan), x.plan).tokens_per_s
            for name, x in self.candidates.items()
        }
        return sorted(rates, key=lambda name: -rates[name])


def _plan(cfg: RLConfig | PlanConfig, nproc: int) -> RunPlan:
    return plan_here(cfg, cfg.cluster.num_processes if cfg.cluster.is_used else nproc, starts=True)


def _changed(cfg: PlanConfig, nproc: int, change: Change) -> PlanConfig:
    found = changed(_plan(cfg, nproc), change).config
    assert isinstance(found, PlanConfig)
    return found


def _refusal(candidate: Candidate) -> str:
    """Reason why the run would not start, or empty."""
    found = check_plan(candidate.plan)
    return next((finding.message for finding in found if finding.level == "error"), "")


def _predicted_gib(candidate: Candidate) -> float:
    """Predicted memory of the fullest device, or of the fullest process on a CPU, in GiB."""
    plan = candidate.plan
    if not plan.is_on_cpu:
        return peak_bytes(plan) / _GIB
    roles = host_roles(plan, num_local=candidate.nproc)
    return max(sum(role.parts.values()) for role in roles) / _GIB


def _off(pairs: Sequence[tuple[float, float]]) -> str:
    errors = [abs(ours / theirs - 1) for ours, theirs in pairs if not math.isnan(ours)] or [
        math.nan
    ]
    return f"{median(errors):.1%} off, at most {max(errors):.1%}"


def _with_lengths(planning: PlanningConfig, measured: Measured) -> PlanningConfig:
    lengths = [max(length, 1) for length in chain.from_iterable(measured.lengths)]
    drawn = LengthsConfig(median=median(lengths), sigma=pstdev(map(math.log, lengths)))
    return planning.model_copy(
        update={"lengths": drawn, "prompt_tokens": max(measured.num_prompt_tokens, 1)}
    )


def _drawn_lengths(cfg: PlanConfig) -> list[list[int]]:
    """Completion lengths of the groups' samples that `plan` assumes."""
    size = cfg.rollout.n_samples_per_prompt
    drawn = draw_lengths(
        cfg.plan.lengths,
        4 * cfg.rollout.prompts_per_step * size,
        most=cfg.rollout.max_completion_tokens,
        rng=np.random.default_rng(cfg.run.seed),
    )
    return np.reshape(drawn, (-1, size)).tolist()


def _require_usable(cfg: PlanConfig, output: Path) -> None:
    if output.suffix not in (".yaml", ".yml"):
        raise UserError(f"output is '{output}', and `hone tune` writes a recipe: name a .yaml file")
    if (problem := unwritable(output.parent)) is not None:
        raise UserError(f"output '{output}' cannot be written: its folder {problem}")
    if cfg.model.shape is not None or not cfg.model.path:
        raise UserError("`hone tune` runs the model: set model.path, and leave out model.shape")
    if not cfg.data.train:
        raise UserError("data.train is not set: name the data with --data.train.0.path")
    if cfg.plan.goal == "memory":
        raise UserError("plan.goal is memory; `hone tune` takes throughput or on_policy")
