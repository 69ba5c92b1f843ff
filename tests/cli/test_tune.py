"""`hone tune`: candidates that die, a search that goes on where it was, the recipe it writes."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import pytest

from hone.cli.main import main
from hone.cli.tune import Search
from hone.config.load import load_config
from hone.config.tree import PlanConfig, RLConfig
from hone.errors import UserError
from hone.hardware import known_gpu
from hone.tools.plan.calibration import Measured, simulated
from hone.tools.plan.short_runs import OUT_OF_MEMORY, Candidate, Result, ShortRuns, failure
from tests.tables import table
from tests.tiny_runs import write_inputs

FLAGS = (
    "--model.path=model",
    "--data.train.0.path=train.jsonl",
    "--data.chat=never",
    "--data.max_prompt_tokens=8",
    "--rollout.prompts_per_step=4",
    "--rollout.n_samples_per_prompt=4",
    "--rollout.max_completion_tokens=8",
    "--engine.max_num_seqs=8",
    "--reward.functions.0.fn=exact_match",
    "--reward.num_workers=1",
    "--trainer.max_tokens_per_microbatch=32",
    "--run.device=cpu",
)


@pytest.fixture(autouse=True)
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path)


class Machine:
    """Measures by the planner's own constants, but for candidates whose names contain a word of
    `reasons`; a step is shorter with larger micro-batches."""

    def __init__(self, **reasons: str) -> None:
        self.asked: list[str] = []
        self.reasons = reasons

    def __call__(self, candidate: Candidate, held: Path = Path()) -> Result:
        self.asked.append(candidate.name)
        for word, why in self.reasons.items():
            if word in candidate.name:
                return Result(reason=why)
        lengths = [[4, 8, 2, 8]] * 4
        run = simulated(PlanConfig().plan, candidate.plan, lengths, 4)
        faster = 1 + candidate.cfg.trainer.max_tokens_per_microbatch / 640
        step = Measured(
            step_s=run.step_s / faster,
            engine_busy_s=sum(end - start for start, end in run.engine_busy[0]) / len(run.steps),
            train_s=fmean(step.train_s for step in run.steady) - PlanConfig().plan.overhead_s,
            sync_s=fmean(step.sync_s for step in run.steady),
            wait_s=fmean(step.wait_s for step in run.steady),
            cache_bytes=0,
            num_prompt_tokens=4,
            lengths=lengths,
        )
        return Result(step, "", run.tokens_per_s * faster, 0.5)


def searched(machine: Machine, number: int, *flags: str) -> Search:
    cfg = load_config(PlanConfig, None, [*FLAGS, *flags])
    search = Search(cfg, None, machine, number)
    search.measure_best()
    return search


def told(search: Search) -> str:
    return "\n".join(search.report())


def test_candidates_that_die_are_listed_and_end_nothing() -> None:
    machine = Machine(recompute="a bug (log.txt)", max_staleness=OUT_OF_MEMORY)
    search = searched(machine, 6)
    best = search.raise_budget()
    assert "trainer.recompute_every_n_layers 2: a bug (log.txt)" in told(search)
    assert "max_staleness 1, algorithm.correction.kind tis: out of memory" in told(search)
    assert "staleness" not in best.name
    assert "trainer.max_tokens_per_microbatch" in best.name
    assert len(machine.asked) == len(set(machine.asked)) > 6


def test_budgets_grow_until_memory_ends() -> None:
    machine = Machine(microbatch=OUT_OF_MEMORY)
    search = searched(machine, 1)
    assert search.raise_budget().name == "the recipe as it is"
    budgets = [int(name.split()[-1]) for name in machine.asked[1:]]
    assert budgets == [64, 45, 38]


@pytest.mark.parametrize(
    ("flag", "said"),
    [("--trainer.max_tokens_per_microbatch=4", "max_tokens_per_microbatch is 4, less than")],
)
def test_what_the_check_refuses_is_not_measured(flag: str, said: str) -> None:
    machine = Machine()
    with pytest.raises(UserError, match=said):
        searched(machine, 3, flag)
    assert machine.asked == []


def test_a_recipe_that_dies_as_it_is_ends_the_search_but_for_memory() -> None:
    with pytest.raises(UserError, match=r"^a bug"):
        searched(Machine(**{"": "a bug"}), 4)
    machine = Machine(**{"": OUT_OF_MEMORY})
    with pytest.raises(UserError, match=r"could be measured.*recipe as it is: out of memory"):
        searched(machine, 4).raise_budget()
    assert len(machine.asked) == 4


def test_goal_on_policy_keeps_samples_of_the_newest_weights() -> None:
    machine = Machine()
    searched(machine, 9, "--plan.goal=on_policy")
    assert len(machine.asked) > 2
    assert not [name for name in machine.asked if "staleness" in name or "oversample" in name]


def test_on_gpus_the_outcomes_of_the_plan_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner's own constants are right there, so that its pick is."""
    for module in ("hone.cli.command", "hone.cli.tune"):
        monkeypatch.setattr(f"{module}.max_gpus", lambda *_: 2)
    monkeypatch.setattr("hone.cli.command.installed_gpu", lambda: known_gpu("h200"))
    monkeypatch.setattr("hone.extras.is_installed", lambda name: True)
    machine = Machine()
    search = searched(machine, 6, "--run.device=cuda", "--plan.steps=4")
    assert machine.asked[0] == "the recipe as it is"
    assert len(machine.asked) == 6
    assert any("cluster.num_engines 1" in name for name in machine.asked)
    assert {candidate.nproc for candidate in search.candidates.values()} == {1, 2}
    search.raise_budget()
    assert "the pick is 0.0% behind" in told(search).split("before the fit")[1]
    assert "--plan.training_share" in told(search)


def test_what_is_measured_is_kept_and_reused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A search that is interrupted goes on; other steps or data are other measurements, and only
    failures of memory stay."""
    machine, alive = Machine(staleness="a bug", recompute=OUT_OF_MEMORY), 2

    def measured(self: ShortRuns, candidate: Candidate, held: Path) -> Result:
        if len(machine.asked) == alive:
            raise KeyboardInterrupt
        return machine(candidate)

    monkeypatch.setattr(ShortRuns, "_measure", measured)
    words = ["tune", *FLAGS, "--candidates=5", "--run.dir=mine"]
    assert main(words) == 130
    said = capsys.readouterr()
    assert "the same command goes on" in said.err
    assert len(machine.asked) == 2
    table = said.out.partition("measured, predicted")[2]
    assert all(name in table for name in machine.asked)
    assert "predicted memory is" in table
    alive = 100
    assert main(words) == 0
    asked = len(set(machine.asked))
    again = [name for name in set(machine.asked) if machine.asked.count(name) > 1]
    assert all("staleness" in name for name in again)
    machine.asked.clear()
    assert main(words) == 0
    assert machine.asked, "a failure that is not of memory is tried again"
    assert all("staleness" in name for name in machine.asked)
    machine.asked.clear()
    assert main([*words, "--steps-each=2"]) == 0
    assert len(machine.asked) == asked
    machine.asked.clear()
    with Path("train.jsonl").open("a") as file:
        file.write('{"prompt": "1+1=", "answer": "2"}\n')
    assert main(words) == 0
    assert len(machine.asked) == asked


def test_the_recipe_passes_the_check_and_is_the_fastest(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    machine = Machine()
    monkeypatch.setattr(ShortRuns, "_measure", lambda self, *words: machine(*words))
    assert main(["tune", *FLAGS, "--candidates=4", "--output=out/best.yaml"]) == 0
    assert "hone rl out/best.yaml" in caplog.text
    table, text = capsys.readouterr().out.splitlines(), Path("out/best.yaml").read_text()
    assert all(f"# {line}\n" in text for line in table)
    assert main(["check", "rl", "out/best.yaml", "--nproc=1"]) == 0
    written = load_config(RLConfig, Path("out/best.yaml"), ())
    search = searched(Machine(), 4)
    winner = search.raise_budget()
    assert written.trainer == winner.cfg.trainer
    assert written.trainer.max_tokens_per_microbatch > 32
    assert written.rollout == winner.cfg.rollout


@table(
    "words, said",
    [
        (["--candidates=0"], "--candidates takes a whole number above 0, got '0'"),
        (["--steps-each=1.5"], "--steps-each takes a whole number"),
        (["--output=x.json"], "name a .yaml file"),
        (["--model.shape=qwen3-8b"], "set model.path"),
        (["--model.path=none"], "not known before it is loaded"),
        (["--plan.goal=memory"], "takes throughput or on_policy"),
    ],
)
def test_mistakes(words: Sequence[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", *FLAGS, *words]) == 2
    assert said in capsys.readouterr().err
    assert not Path("runs").exists()


def test_help_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--help"]) == 0
    text = capsys.readouterr().out
    assert "hone tune gsm8k" in text
    assert max(map(len, text.splitlines())) <= 80


@table(
    "log, code, said",
    [
        ("", -signal.SIGKILL, OUT_OF_MEMORY),
        ("x\nerror: a.b is 1\nmore\n", 2, "a.b is 1 (log.txt)"),
        ("x\nTypeError: no\n", 1, "TypeError: no (log.txt)"),
        ("", 1, "code 1 (log.txt)"),
    ],
)
def test_reasons(log: str, code: int, said: str) -> None:
    Path("log.txt").write_text(log)
    assert failure(None, code, Path("log.txt")) == said


@pytest.mark.slow
def test_end_to_end_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tune", *FLAGS, "--candidates=2", "--steps-each=2", "--plan.goal=on_policy"]
    assert main(words) == 0
    results = [json.loads(file.read_text()) for file in Path("runs").glob("rl-tune/*/result.json")]
    assert len(results) >= 2
    assert all(result["step"]["step_s"] > 0 for result in results)
    assert not list(Path("runs").glob("rl-tune/*/run"))
    first = capsys.readouterr().out
    assert main(["check", "rl", "runs/rl-tune/tuned.yaml", "--nproc=1"]) == 0
    capsys.readouterr()
    assert main(words) == 0
    assert capsys.readouterr().out == first, "of what is kept"
