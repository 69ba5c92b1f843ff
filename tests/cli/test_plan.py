"""`hone plan`: help, the table, the files, mistakes, and neither torch nor a model."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hone.cli.command import plan_here, take_nproc
from hone.cli.main import main
from hone.config import schema
from hone.config.load import load_config, resolve_recipe
from hone.config.plan import Devices, RunPlan, resolve
from hone.config.tree import PlanConfig, RLConfig
from hone.planner.fitting import does_fit
from hone.rules import findings
from hone.tools.plan.comparison import compare, launch_words, run_flags
from hone.tools.plan.simulator import Placement
from tests.config import workspace
from tests.config.workspace import BASE
from tests.tables import table

SMALL = (
    "--model.shape=qwen3-0.6b",
    "--rollout.prompts_per_step=4",
    "--rollout.n_samples_per_prompt=4",
    "--plan.gpus=3",
    "--plan.steps=4",
    "--plan.lengths.median=100",
)
BIG = ("--model.shape=qwen2.5-7b", "--plan.gpu=a100", "--plan.gpus=4", "--plan.steps=4")
"""What needs other settings of memory than the default."""

QLORA = ("--model.lora.rank=16", "--model.lora.load_in_4bit=true")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


def output(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    assert main(["plan", *argv]) == code
    captured = capsys.readouterr()
    return captured.out + captured.err


@table("argv", [[], ["--help"], ["-h"]])
def test_help_teaches(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, *argv)
    assert "hone plan gsm8k --plan.gpus 8" in text
    assert max(map(len, text.splitlines())) <= 80


def test_R22_help_explains_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    flat = " ".join(output(capsys, "--help", "plan", "model").split())
    for field in schema.fields(PlanConfig):
        if field.path[0] in ("plan", "model"):
            assert field.help in flat, field.key
            assert field.key in flat
    assert "has to do with 'simulat'" in output(capsys, "--help", "simulat", code=2)


def test_table_numbers_and_plot(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, *SMALL, "--output=out/here.json")
    assert max(len(line) for line in text.splitlines() if not line.startswith("--")) <= 80
    assert re.search(r"\nmode +split s/step", text)
    flat = " ".join(text.split())
    assert "qwen3-0.6b on 3 x H200: 4 prompts of 256 tokens x 4 samples a step" in flat
    assert "sync colocated * 3 = 3" in flat
    assert "* plain run (sync colocated); x plain: " in flat
    assert "stale: updates behind, mean" in flat
    assert "Asynchrony " in flat
    assert re.search(r"a step of sync colocated, 3 GPUs: [0-9.]+ s sampling, ", flat)
    written = json.loads(Path("out/here.json").read_text())
    assert written["config"]["rollout"]["prompts_per_step"] == 4
    assert len(written["runs"]) == 2 + 2 * 4 + 4  # engines of one GPU, and of two
    for run in written["runs"]:
        assert len(run["steps"]) == 4
        assert f"{run['tokens_per_s']:,.0f}" in flat
        lengths = sum(step["num_completion_tokens"] for step in run["steps"])
        prompts = 4 * 4 * 4 * 256  # steps, prompts, samples, tokens
        assert sum(step["num_tokens"] for step in run["steps"]) == lengths + prompts
        assert 0 < run["completion_tokens_per_s"] < run["tokens_per_s"]
    assert f"{written['runs'][0]['completion_tokens_per_s']:,.0f} of completions" in flat


def test_the_first_is_written_as_a_recipe_that_passes_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = output(capsys, *BIG, "--output=plan.yaml")
    assert "memory of " in text
    assert re.search(r" before .*: [0-9.e+]+ s less a step: ", " ".join(text.split()))
    recipe = Path("plan.yaml").read_text()
    assert recipe.startswith("# ")
    assert "model.path is yours to set: a folder or hub name of a qwen2.5-7b" in recipe
    (line,) = (line for line in recipe.splitlines() if "its numbers come from: hone check" in line)
    words = line.partition("hone check THIS_FILE ")[2].split()
    assert main(["check", "plan.yaml", *words]) == 2
    told = " ".join(capsys.readouterr().out.split())
    assert "errors: 1, of data.train" in told
    assert "Planned for 4 x A100" in told
    best = compare(load_config(PlanConfig, None, BIG)).recommended
    flags = ["--model.path=Qwen/Qwen2.5-7B", "--data.train.0.path=openai/gsm8k"]
    planned = load_config(RLConfig, Path("plan.yaml"), flags)
    assert planned.trainer == best.plan.config.trainer
    assert planned.engine == best.plan.config.engine
    cluster, placement = planned.cluster, best.run.placement
    assert (cluster.num_engines, cluster.num_trainers) == (
        (0, 1) if placement.colocated else (placement.num_engines, placement.num_trainers)
    )


@pytest.mark.parametrize(
    ("flags", "budget"),
    [
        # Two rows of 2048 tokens do not fit beside 32B; beside 0.6B they do.
        (("--model.shape=qwen3-32b", "--plan.gpus=1", "--engine.weight_dtype=int8", *QLORA), 2048),
        (
            (
                "--model.shape=qwen3-0.6b",
                "--plan.gpus=1",
                "--trainer.max_tokens_per_microbatch=2048",
            ),
            4096,
        ),
    ],
)
def test_hone_check_warns_of_nothing_that_a_plan_has_written(
    flags: tuple[str, ...], budget: int, capsys: pytest.CaptureFixture[str]
) -> None:
    given = (*flags, "--plan.gpu=h100", "--plan.steps=4", "--checkpoint.every_n_steps=0")
    output(capsys, *given, "--output=plan.yaml")
    check = ["check", "rl", "plan.yaml", "--gpu", "h100", "--json", "--nproc", "1"]
    model = f"--model.path=Qwen/{flags[0].partition('=')[2]}"
    assert main([*check, model, "--data.train.0.path=a/b"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["findings"] == []
    assert found["config"]["trainer"]["max_tokens_per_microbatch"] == budget


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--model.shape=qwen2.5-14b", "--plan.gpu=4090", "--plan.gpus=1"), "or 1 x A100"),
        (("--model.shape=llama-3.1-70b", "--plan.gpu=4090", "--plan.gpus=8"), "of these GPUs"),
    ],
)
def test_what_fits_nowhere_is_told_with_what_would_make_it_possible(
    flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = output(capsys, *flags, code=2)
    assert "cannot be split into trainers and engines" in text
    assert said in text


@pytest.mark.parametrize("shape", ["qwen3-23b", "Qwen/Qwen3-32B"])
def test_a_shape_that_is_not_known_is_told_with_the_nearest(
    shape: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = output(capsys, f"--model.shape={shape}", "--plan.gpus=1", code=2)
    assert f"model.shape is '{shape}', which is no public shape" in text
    assert "Did you mean 'qwen3-32b'?" in text


@table(
    "flags",
    [
        "--model.lora.target_modules=[nonsense]",
        "--model.lora.target_modules=[q_proj,experts.gate_up]",
        "--model.lora.load_in_4bit=true --rollout.temperature=0",
    ],
)
def test_what_no_placement_mends_is_refused_as_by_the_check(
    flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--model.shape=qwen3-30b-a3b", "--model.lora.rank=16", *flags.split())
    text = output(capsys, *given, "--plan.gpus=4", "--plan.gpu=h100", code=2)
    told = [line.removeprefix("error: ") for line in text.splitlines() if line.startswith("error")]
    main(["check", "rl", *given, "--gpu=h100", "--nproc=4", "--json"])
    found = json.loads(capsys.readouterr().out)["findings"]
    assert told
    assert set(told) <= {x["message"] for x in found if x["level"] == "error"}


@pytest.mark.parametrize("goal", ["throughput", "on_policy", "memory"])
def test_the_goal_says_what_comes_first(goal: str) -> None:
    found = compare(load_config(PlanConfig, None, [*BIG, f"--plan.goal={goal}"])).outcomes
    rates = [x.run.tokens_per_s for x in found]
    fresh = [x.run.tokens_per_s for x in found if x.run.staleness_max == 0]
    if goal == "throughput":
        assert rates == sorted(rates, reverse=True)
    elif goal == "on_policy":
        assert rates[: len(fresh)] == sorted(fresh, reverse=True)
    else:
        peaks = [x.peak_bytes for x in found]
        assert peaks == sorted(peaks)
        fastest = compare(load_config(PlanConfig, None, BIG)).outcomes[0]
        assert peaks[0] < fastest.peak_bytes


def test_nothing_is_written_unless_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, *SMALL)
    assert "sync colocated" in text
    assert not list(Path.cwd().iterdir())
    assert "numbers in" not in text


def test_the_plain_run_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, *SMALL, "--plan.gpus=8", "--plan.lengths.sigma=1.5")
    assert "sync colocated" in text
    assert "slower ones are left out; --output FILE.json has all" in " ".join(text.split())


def test_recipes_and_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "gsm8k", "--plan.gpus=2", "--plan.steps=4")
    assert "Qwen/Qwen3-0.6B on 2 x H200: 32 prompts" in " ".join(text.split())
    for flags, said in (
        (["--plan.gpu=H2000"], "hone's table lacks"),
        (["--trainer.parallel.ring_size=4"], "cannot be split into trainers"),
        (["--plan.gpuz=1"], "plan.gpuz"),
        (["--nproc", "2"], "set plan.gpus instead"),
        (
            ["--cluster.num_engines=3"],
            "+ cluster.num_engines 3 x engine.tensor_parallel_size 1 = 4",
        ),
        (["--cluster.num_references=1"], "nothing for it to score"),
        (
            ["--cluster.num_references=8", "--algorithm.kl.coef=0.1", "--plan.gpus=8"],
            "leaves none to trainers and engines",
        ),
        (
            ["--output=x.svg"],
            "Give the path of a .json file, such as bench.json",
        ),
        (["--plan.lengths.distribution=file"], "plan.lengths.path"),
    ):
        assert said in output(capsys, *SMALL, *flags, code=2)
    assert not Path("x.svg").exists()
    unused = PlanConfig.model_validate({"plan": {"lengths": {"path": "x"}}})
    (finding,) = findings(plan_here(unused, 1))
    assert "plan.lengths.path is x and has no effect" in finding.message
    hosts = PlanConfig.model_validate({"cluster": {"devices_per_node": 8, "num_nodes": 2}})
    (finding,) = findings(plan_here(hosts, 1))
    assert (finding.level, finding.keys) == (
        "warning",
        ("cluster.num_nodes", "cluster.devices_per_node"),
    )


@pytest.mark.parametrize(
    "given",
    [
        ("--plan.gpus=2",),
        ("--plan.gpus=8", "--algorithm.correction.kind=none"),
        ("--plan.gpus=5", "--engine.tensor_parallel_size=2", "--engine.enable_sleep"),
        ("--plan.gpus=6", "--cluster.num_references=2", "--algorithm.kl.coef=0.1"),
        ("--plan.gpus=16", "--cluster.devices_per_node=8"),
        (
            "--cluster.num_trainers=2",
            "--cluster.num_engines=2",
            "--cluster.num_nodes=2",
            "--cluster.devices_per_node=2",
            "--cluster.address=auto",
            "--pipeline.max_staleness=3",
            "--pipeline.in_flight=abort",
        ),
        ("--plan.gpus=2", "--trainer.enable_sleep", "--rollout.oversample_prompts=4"),
        ("--plan.gpus=2", "--engine.weight_dtype=int8", "--algorithm.correction.kind=none"),
        ("--plan.gpus=2", "--engine.kv_cache_dtype=fp8", "--algorithm.correction.kind=none"),
    ],
)
def test_the_flags_of_an_outcome_run_what_was_simulated(
    given: tuple[str, ...], tmp_path: Path
) -> None:
    """Loaded by `hone rl` they pass its checks, and mean this mode on these devices."""
    workspace.fill(tmp_path)
    recipe, quick = resolve_recipe("gsm8k"), ("--plan.steps=4", "--plan.lengths.median=50")
    cfg = load_config(PlanConfig, recipe, [*given, *quick, "--model.shape=qwen3-0.6b"])
    outcomes = compare(cfg).outcomes
    assert outcomes
    kept = [flag for flag in given if not flag.startswith("--plan.")]
    data = [*BASE["rl"], "--data.eval=[]", "--eval.every_n_steps=0", "--eval.at_start=false"]
    for outcome in outcomes:
        nproc, flags = take_nproc(run_flags(cfg, outcome))
        if (launch := launch_words(outcome))[0] == "torchrun":
            nproc = int(launch[2]) * int(launch[4])
        run = load_config(RLConfig, recipe, [*data, *kept, *flags])
        cluster, placement = run.cluster, outcome.run.placement
        trainers = cluster.num_trainers if cluster.is_used else nproc or 1
        plan = resolve(run, None, Devices(), world_size=trainers)
        found = [x.message for x in findings(plan)]
        assert not found, (outcome.name, found)
        assert placement == Placement(
            num_trainers=trainers,
            num_engines=cluster.num_engines or trainers // run.engine.tensor_parallel_size,
            tensor_parallel_size=run.engine.tensor_parallel_size,
            colocated=not cluster.num_engines,
        )
        assert run.pipeline.samples_ahead == outcome.is_async
        assert run.rollout.oversample_prompts == outcome.run.rollout.oversample_prompts
        if outcome.is_async:
            simulated = outcome.run.pipeline
            assert run.pipeline.max_staleness == simulated.max_staleness
            assert run.pipeline.max_staleness == simulated.max_staleness
            assert run.pipeline.in_flight == simulated.in_flight


LLAMA_70B = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 128_256,
}


def test_colocated_engines_are_over_as_many_devices_as_they_need(tmp_path: Path) -> None:
    """70B: 131 GiB of weights, of which an engine on a trainer's device has a copy: an eighth of it
    fits."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    given = (
        f"--model.path={tmp_path}",
        "--plan.gpu=a100-80g",
        "--plan.gpus=64",
        "--plan.steps=4",
        "--engine.tensor_parallel_size=8",
    )
    result = compare(load_config(PlanConfig, None, given))
    assert {x.split for x in result.outcomes if x.run.placement.colocated} == {"64 = 8 x 8"}
    told = "engines of 1 GPU: where they share GPUs with trainers, a step needs more than the 79"
    assert any(told in note for note in result.notes)
    assert not any(" trainers: where they share" in note for note in result.notes)
    for outcome in result.outcomes:
        assert does_fit(outcome.plan)
        if outcome.run.placement.colocated:
            assert outcome.plan.roles["engine"].num_workers == 8
            continue
        _, flags = take_nproc(run_flags(result.cfg, outcome))
        words = dict(zip(flags[::2], flags[1::2], strict=True))
        number = int(words["--cluster.num_trainers"])
        assert number <= 8 or number % 8 == 0, "trainers beside engines have whole nodes"
        assert words["--cluster.address"] == "auto"
        assert words["--cluster.num_nodes"] == "8"


def test_trainers_of_several_nodes_are_started_on_each() -> None:
    cfg = load_config(PlanConfig, None, [*SMALL, "--plan.gpus=16"])
    found = {x.split: x for x in compare(cfg).outcomes}
    singles = {x for x in found if not x.endswith((" x 2", " x 4", " x 8"))}
    assert singles == {"16 = 16", *(f"{n} + {16 - n}" for n in range(1, 9))}
    assert launch_words(found["16 = 16"]) == shlex.split(
        "torchrun --nnodes 2 --nproc-per-node 8 -m hone rl"
    )
    assert "--nproc" not in run_flags(cfg, found["16 = 16"])
    assert launch_words(found["8 + 8"]) == ["hone", "rl"]


def test_rows_that_fit_by_less_than_predictions_were_off_are_marked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whole weights for sampling hardly fit beside a trainer of 7B on GPUs of 24 GiB."""
    given = ("--model.shape=qwen2.5-7b", "--plan.gpu=4090", "--plan.gpus=4", "--plan.steps=4")
    text = output(capsys, *given, "--output=all.json")
    runs = json.loads(Path("all.json").read_text())["runs"][:16]
    rows = [line for line in text.splitlines() if re.match("(sync|partial|async, ).*%", line)]
    for run, row in zip(runs, rows, strict=True):
        assert run["leaves_margin"] != (" ! " in row), row
    assert {run["leaves_margin"] for run in runs} == {True, False}
    assert "! fits by less than predictions have been off: `hone check` says what helps" in text
    text = output(capsys, *SMALL)
    assert "!" not in text


def test_what_is_shown_of_memory_is_what_the_search_has_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether a row leaves the margin is asked for once for each plan that was found without it."""
    given = (*SMALL, "--output=all.json")
    result = compare(load_config(PlanConfig, None, given))

    def asked(plan: RunPlan) -> int:
        raise AssertionError("asked again whether a plan fits")

    monkeypatch.setattr("hone.cli.plan.compare", lambda cfg, report: result)
    monkeypatch.setattr("hone.planner.fitting._excess", asked)
    assert "tok/s" in output(capsys, *given)


def test_a_note_on_numbers_of_trainers_names_none_that_is_in_the_table() -> None:
    result = compare(load_config(PlanConfig, None, [*SMALL, "--plan.gpus=24"]))
    assert {16, 24} <= {x.run.placement.num_trainers for x in result.outcomes}
    (told,) = (note for note in result.notes if "trainers: " in note)
    assert told.startswith("9 to 15 and 17 to 23 trainers: beside engines they have whole nodes")


def test_what_no_prediction_tells_from_the_first_is_left_on_policy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ("--model.shape=qwen3.5-0.8b", "--plan.gpus=1", "--plan.gpu=h200", "--plan.steps=4")
    result = compare(load_config(PlanConfig, None, given))
    assert result.outcomes[0].mode == "partial colocated"
    assert result.speedup(result.outcomes[0]) < 1.1
    text = " ".join(output(capsys, *given, "--output=plan.yaml").split())
    assert "To run sync colocated, 1 GPU (all of whose samples are of the newest weights" in text
    assert "a step of partial colocated, 1 GPU: " in text, "the first is told of too"
    assert "memory of sync colocated, 1 GPU, of 140 GiB" in text
    recipe = Path("plan.yaml").read_text()
    assert recipe.startswith("# sync colocated, 1 GPU, planned for ")
    assert "oversample_prompts" not in recipe + text
    assert "correction" not in recipe + text
    output(capsys, *given, "--output=all.json")
    found = json.loads(Path("all.json").read_text())
    assert found["runs"][found["recommended"]]["mode"] == "sync colocated"
    least = compare(load_config(PlanConfig, None, [*given, "--plan.goal=memory"]))
    assert least.recommended is least.outcomes[0]


def test_the_fastest_comes_with_its_flags_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    given = (*SMALL, "--plan.gpus=8", "--plan.lengths.sigma=1.5")
    result = compare(load_config(PlanConfig, None, given))
    best = result.outcomes[0]
    assert best.is_async
    assert result.recommended is best, "it is faster by more than predictions are off"
    text = output(capsys, *given)
    assert re.search(
        r"a step of async, [^:]*: [0-9.]+ s waiting for samples, ", " ".join(text.split())
    )
    last = text.splitlines()[-1]
    placement = best.run.placement
    assert f"--cluster.num_trainers {placement.num_trainers} " in last
    assert f"--cluster.num_engines {placement.num_engines} " in last
    assert "--pipeline.max_staleness" in last
    assert "--algorithm.correction.kind tis" in last


def test_neither_torch_nor_transformers_is_loaded() -> None:
    program = (
        "import sys; from hone.cli.main import main; code = main(sys.argv[1:]);"
        "raise SystemExit(code or bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", program, "plan", *SMALL], check=True)
