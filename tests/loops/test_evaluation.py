"""`hone generate` on several processes: who samples what, who writes and who talks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.loops.conftest import MakeConfig
from tests.ports import reserved_port
from tests.tiny_runs import lines

from hone.cli.main import main
from hone.config.tree import EvaluateConfig
from hone.loops import evaluation, reinforce
from hone.loops.evaluation import run_evaluation
from hone.models.tiny import make_tiny_model
from hone.rollout.evaluate import evaluate

NUM_PROMPTS, NUM_SAMPLES = 5, 2
FLAGS = (
    "--model.path=model",
    "--run.device=cpu",
    "--data.train.0.path=prompts.jsonl",
    "--data.max_prompt_tokens=32",
    "--generation.max_completion_tokens=6",
    f"--n_samples_per_prompt={NUM_SAMPLES}",
    "--engine.max_num_batched_tokens=8",  # a warning
)
PROMPTS = "".join(f'{{"prompt": "{i} + {i} ="}}\n' for i in range(NUM_PROMPTS))
MODELS = {
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
ENV = """
from hone.envs import Observation

class Twice:
    def step(self, episode):
        if len(episode.turns) == 2 or episode.must_end:
            return float(len(episode.turn))
        return Observation(" again ", role=None, max_tokens=6)
"""
PLAYED = (
    *("--env.path=envs.py:Twice", "--generation.max_completion_tokens=24"),
    f"--generation.stop={[*'aeiounrst0123456789']}",
)
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def generate(folder, world_size, *flags):
    """What each process says, and the file that was written."""
    for name in ("completions.jsonl", "completions.jsonl.config.yaml"):
        (folder / name).unlink(missing_ok=True)  # of other settings
    texts, codes = run_processes(folder, world_size, "generate", *FLAGS, *flags)
    assert codes == [0] * world_size, texts
    return texts, lines(folder / "completions.jsonl")


def run_processes(folder, world_size, *arguments, deadline_s=600):
    """What each process says, and its exit code."""
    with reserved_port() as port:
        return run_with_port(folder, world_size, port, arguments, deadline_s)


def run_with_port(folder, world_size, port, arguments, deadline_s):
    plain = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    plain |= {"OMP_NUM_THREADS": "1"}
    if world_size > 1:
        plain |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = []
    for rank in range(world_size):
        numbers = map(str, (rank, rank, world_size, world_size))
        own = dict(zip(VARIABLES, numbers, strict=True)) if world_size > 1 else {}
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "hone", *arguments],
                cwd=folder,
                env=plain | own,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        texts = [process.communicate(timeout=deadline_s)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return texts, [process.returncode for process in processes]


@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
def test_several_processes_write_the_rows_of_one_and_the_first_talks(tmp_path, family):
    make_tiny_model(
        tmp_path / "model", family=family, num_layers=1, hidden_size=32, **MODELS[family]
    )
    (tmp_path / "prompts.jsonl").write_text(PROMPTS)
    (tmp_path / "envs.py").write_text(ENV)
    (alone,), expected = generate(tmp_path, 1, *PLAYED)
    assert "10 completions written to completions.jsonl" in alone
    assert len(expected) == NUM_PROMPTS * NUM_SAMPLES
    assert any(len(row["turns"]) == 2 for row in expected)
    for flags in ([], ["--engine.tensor_parallel_size=2"]):
        (first, second), found = generate(tmp_path, 2, *PLAYED, *flags)
        for key in ("id", "prompt", "index", "token_ids", "loss_mask", "turns", "reward"):
            assert [row[key] for row in found] == [row[key] for row in expected]
        assert "10 completions written to completions.jsonl" in first
        assert "warning: engine.max_num_batched_tokens" in first
        assert second == ""


@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
def test_an_engine_of_two_devices_scores_what_one_does(tmp_path, family):
    make_tiny_model(
        tmp_path / "model", family=family, num_layers=1, hidden_size=32, **MODELS[family]
    )
    rows = "".join(f'{{"prompt": "{i} + {i} =", "answer": "1"}}\n' for i in range(NUM_PROMPTS))
    (tmp_path / "rows.jsonl").write_text(rows)
    (tmp_path / "r.py").write_text("def letters(completion): return float(len(completion))")
    flags = ("--data.eval.0.path=rows.jsonl", "--reward.functions.0.fn=r.py:letters")
    flags = (*FLAGS[:2], *flags, "--eval.max_completion_tokens=6", "--eval.n_samples_per_prompt=2")
    scores = []
    for size, world_size in ((1, 1), (2, 2), (2, 4)):
        own = (f"--run.dir=e{size}{world_size}", f"--engine.tensor_parallel_size={size}")
        texts, codes = run_processes(tmp_path, world_size, "eval", *flags, *own)
        assert codes == [0] * world_size, texts
        assert all(text == "" for text in texts[1:]), texts
        scores.append(json.loads((tmp_path / own[0][10:] / "eval.json").read_text()))
        assert len(lines(tmp_path / own[0][10:] / "eval_samples.jsonl")) == 2 * NUM_PROMPTS
    assert scores[0]["eval/reward/mean"] > 0
    assert scores[1] == scores[2] == pytest.approx(scores[0])


@pytest.mark.slow
@pytest.mark.parametrize("who", ["all", "the first"])
def test_processes_that_nobody_watches_end_where_the_first_refuses(tmp_path, who):
    """Started by hand: the store over which they meet ends with the first process, and nobody
    waits until an operation on it has timed out, which takes 300 s or more."""
    make_tiny_model(tmp_path / "model", num_layers=1, hidden_size=32)
    (tmp_path / "prompts.jsonl").write_text(PROMPTS)
    if who == "all":
        (tmp_path / "completions.jsonl").write_text("mine")
        arguments = ("generate", *FLAGS)
    else:
        (tmp_path / "r.py").write_text("def f(completion, level): return 1.0")
        data = ("--data.eval.0.path=prompts.jsonl", "--reward.functions.0.fn=r.py:f")
        arguments = ("eval", *FLAGS[:2], *data, "--eval.max_completion_tokens=6")
    (first, second), codes = run_processes(tmp_path, 2, *arguments, deadline_s=250)
    if who == "all":  # whichever comes first says so
        assert ["exists" in first, "exists" in second].count(True) == 1, (first, second)
        assert sorted(codes) == [1, 2]
    else:
        assert "needs 'level'" in first
        assert second == ""
        assert codes[0] == 2
        assert codes[1]


def test_completions_are_replaced_by_the_same_command_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_tiny_model(tmp_path / "model", num_layers=1, hidden_size=32)
    (tmp_path / "prompts.jsonl").write_text(PROMPTS)
    output = tmp_path / "completions.jsonl"
    assert main(["generate", *FLAGS]) == 0
    first = output.read_bytes()
    assert main(["generate", *FLAGS]) == 0, "twice the same"
    assert output.read_bytes() == first
    for command in (["check", "generate"], ["generate"]):
        assert main([*command, *FLAGS, "--generation.temperature=0.5"]) == 2
        captured = capsys.readouterr()
        told = " ".join((captured.out + captured.err).split())
        assert "output 'completions.jsonl' exists, with completions of other settings" in told
        assert "Name another output, or remove 'completions.jsonl' and" in told
    assert output.read_bytes() == first
    (tmp_path / "completions.jsonl.config.yaml").unlink()
    assert main(["generate", *FLAGS]) == 2
    assert "its settings are not recorded" in capsys.readouterr().err
    assert output.read_bytes() == first


def test_an_evaluation_reads_what_is_trained_only_to_hold_rows_out_of_it(
    tmp_path, monkeypatch, capsys, caplog
):
    caplog.set_level("INFO", logger="hone")
    monkeypatch.chdir(tmp_path)
    make_tiny_model(tmp_path / "model", num_layers=1, hidden_size=32)
    for name, number in (("trained", 8), ("held", 3)):
        rows = (f'{{"prompt": "{i} + {i} =", "answer": "2"}}\n' for i in range(number))
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    flags = (
        *("--model.path=model", "--run.device=cpu", "--data.train.0.path=trained.jsonl"),
        *("--reward.functions.0.fn=exact_match", "--eval.max_completion_tokens=4"),
    )
    for own, is_read in (
        ("--data.eval.0.path=held.jsonl", False),
        ("--data.eval_fraction=0.5", True),
    ):
        caplog.clear()
        assert main(["eval", *flags, own, f"--run.dir={is_read}"]) == 0
        assert ("trained.jsonl: 8 rows" in caplog.text) == is_read
        assert not capsys.readouterr().out.startswith("\n"), "a bar that nobody sees leaves no line"


def test_an_evaluation_is_replaced_by_one_of_the_same_weights_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_tiny_model(tmp_path / "model", num_layers=1, hidden_size=32)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')
    flags = (
        *("--model.path=model", "--run.device=cpu", "--data.eval.0.path=rows.jsonl"),
        *("--reward.functions.0.fn=exact_match", "--eval.max_completion_tokens=4"),
    )
    measured = tmp_path / "runs/eval/eval.json"
    assert main(["eval", *flags]) == 0
    first = measured.read_bytes()
    assert main(["eval", *flags]) == 0, "twice the same"
    (tmp_path / "moved").mkdir()
    (tmp_path / "rows.jsonl").rename(tmp_path / "moved/rows.jsonl")
    flags = ("--data.eval.0.path=moved/rows.jsonl", *(x for x in flags if "rows" not in x))
    assert main(["eval", *flags]) == 0, "the same rows"

    def refused(*others):
        for command in (["check", "eval"], ["eval"]):
            capsys.readouterr()
            assert main([*command, *flags, *others]) == 2
            captured = capsys.readouterr()
            told = " ".join((captured.out + captured.err).split())
            assert "run.dir 'runs/eval' exists, with an evaluation of other settings: " in told
            assert "Name another run.dir, or remove 'runs/eval/eval.json'" in told
        assert measured.read_bytes() == first
        return told

    assert "eval.temperature is 0.5, was 1.0" in refused("--eval.temperature=0.5")
    weights = tmp_path / "model/model.safetensors"
    written_s = weights.stat().st_mtime
    os.utime(weights, (2e9, 2e9))
    assert "weights is " in refused()
    os.utime(weights, (written_s, written_s))
    (tmp_path / "moved/rows.jsonl").write_text('{"prompt": "1 + 2 =", "answer": "3"}\n')
    assert "data.eval.0 is 'rows.jsonl'" in refused()
    measured.unlink()
    assert main(["eval", *flags]) == 0, "a failed one is no result"


def test_the_settings_of_completions_replace_no_other_file(tmp_path, monkeypatch, capsys):
    """Such as a recipe that is named like the output, or the settings of another output."""
    monkeypatch.chdir(tmp_path)
    make_tiny_model(tmp_path / "model", num_layers=1, hidden_size=32)
    (tmp_path / "prompts.jsonl").write_text(PROMPTS)
    recipe = "# mine\ngeneration:\n  temperature: 1.0\n"
    (tmp_path / "a.config.yaml").write_text(recipe)
    for output in ("a.jsonl", "out.v1", "out.v2"):
        assert main(["generate", "a.config.yaml", *FLAGS, f"--output={output}"]) == 0
    assert (tmp_path / "a.config.yaml").read_text() == recipe
    kept = {path.name for path in tmp_path.glob("*.config.yaml")} - {"a.config.yaml"}
    assert kept == {f"{output}.config.yaml" for output in ("a.jsonl", "out.v1", "out.v2")}

    (tmp_path / "b.jsonl.config.yaml").write_text(recipe)
    capsys.readouterr()
    for command in (["check", "generate"], ["generate"]):
        assert main([*command, *FLAGS, "--output=b.jsonl"]) == 2
        captured = capsys.readouterr()
        assert "'b.jsonl.config.yaml' exists" in " ".join((captured.out + captured.err).split())
    assert (tmp_path / "b.jsonl.config.yaml").read_text() == recipe
    assert not (tmp_path / "b.jsonl").exists()


def failing(make_config: MakeConfig, tmp_path: Path, num_samples: int) -> EvaluateConfig:
    """An evaluation of 20 prompts, of which nearly every reward fails."""
    (tmp_path / "broken.py").write_text(
        "def score(completion, answer):\n"
        "    if completion == answer:\n"  # as the evaluation asks before it starts
        "        return 1.0\n"
        "    raise KeyError('column')\n"
    )
    trained = make_config()
    return EvaluateConfig(
        run={"dir": tmp_path / "eval", "device": "cpu"},
        model=trained.model,
        data={"eval": trained.data.eval, "chat": "never", "max_prompt_tokens": 8},
        engine=trained.engine,
        reward={"functions": [{"fn": f"{tmp_path / 'broken.py'}:score"}], "num_workers": 1},
        eval={"max_completion_tokens": 8, "n_samples_per_prompt": num_samples},
    )


@pytest.mark.parametrize(
    ("num_samples", "message", "num_written"),
    [
        (1, "of 20 samples have no reward", range(7, 20)),
        (8, "all of the first 24 samples", range(24, 25)),
    ],
)
def test_an_evaluation_that_fails_leaves_cause_and_samples(
    num_samples: int, message: str, num_written: range, make_config: MakeConfig, tmp_path
):
    """More than 30 in 100 may not fail; what came together with the one too many is there too."""
    cfg = failing(make_config, tmp_path, num_samples)
    with pytest.raises(ValueError, match=message) as caught:
        run_evaluation(cfg)
    (event,) = lines(cfg.run.dir / "events.jsonl")
    assert (event["kind"], event["message"]) == ("eval_error", str(caught.value))
    samples = lines(cfg.run.dir / "eval_samples.jsonl")
    assert all("column" in sample["failure_detail"] for sample in samples)
    assert len(samples) in num_written


def test_an_evaluation_whose_processes_fail_together_leaves_its_samples(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process stays within the limit, so that none stops; all of them together exceed it."""
    no_limit = {"max_failure_rate": 1.0}
    monkeypatch.setattr(
        evaluation, "evaluate", lambda *given, **named: evaluate(*given, **named | no_limit)
    )
    cfg = failing(make_config, tmp_path, 1)
    with pytest.raises(ValueError, match="of 20 samples have no reward"):
        run_evaluation(cfg)
    assert len(lines(cfg.run.dir / "eval_samples.jsonl")) == 20


def test_the_first_evaluation_says_by_what_samples_pass_in_all(make_config: MakeConfig, tmp_path):
    """Also once another process has gone on from a checkpoint."""
    (tmp_path / "shaped.py").write_text(
        "from pathlib import Path\n"
        f"LATER = Path({str(tmp_path / 'later')!r})\n"
        "def shaped(completion):\n"
        "    return 0.3 if LATER.exists() else float('1' in completion)\n"
    )
    cfg = make_config(
        reward={"functions": [{"fn": f"{tmp_path / 'shaped.py'}:shaped"}], "num_workers": 1},
        eval={"at_start": True, "every_n_steps": 1},
        run={"steps": 2},
        checkpoint={"every_n_steps": 1},
    )
    reinforce.run(cfg.model_copy(update={"run": cfg.run.model_copy(update={"steps": 1})}))
    (tmp_path / "later").touch()
    reinforce.run(cfg)
    first, second, third = lines(cfg.run.dir / "metrics.jsonl")
    assert {"eval/pass@1"} <= first.keys() & second.keys() & third.keys()
    assert third["eval/pass@1"] == 0
