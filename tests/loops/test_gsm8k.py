"""GSM8K end to end: chat prompts, math-verify, evaluation, checkpoint, resume."""

from __future__ import annotations

import json
from pathlib import Path

from hone.cli.main import main
from hone.models.tiny import make_bpe_tokenizer, make_tiny_model

ROWS = [
    {
        "question": f"Tom has {a} apples and buys {b} more. How many apples has he now?",
        "answer": f"He has {a} + {b} = <<{a}+{b}={a + b}>>{a + b} apples.\n#### {a + b}",
    }
    for a in range(2, 6)
    for b in range(3, 9)
]


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_gsm8k_trains_evaluates_saves_and_resumes(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", ROWS[:16])
    test = write(tmp_path / "test.jsonl", ROWS[16:])
    texts = [row["question"] for row in ROWS[:16] for _ in range(2)]
    model = make_tiny_model(
        tmp_path / "model",
        tokenizer=make_bpe_tokenizer(texts, 400),
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        intermediate_size=64,
    )

    def run(steps: int) -> list[dict[str, float]]:
        flags = {
            "run.dir": tmp_path / "run",
            "run.steps": steps,
            "model.path": model,
            "data.train.0.path": train,
            "data.train.0.max_rows": 200,
            "data.eval.0.path": test,
            "data.eval.0.max_rows": 8,
            "data.max_prompt_tokens": 400,
            "rollout.prompts_per_step": 4,
            "rollout.n_samples_per_prompt": 4,
            "rollout.max_completion_tokens": 24,
            "reward.num_workers": 1,
            "eval.max_completion_tokens": 24,
            "eval.every_n_steps": 1,
            "trainer.optimizer.warmup_steps": 0,
            "checkpoint.every_n_steps": 1,
            "log.to": "[]",
        }
        arguments = [part for key, value in flags.items() for part in (f"--{key}", str(value))]
        assert main(["rl", "gsm8k", *arguments]) == 0
        return [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]

    run(2)
    rows = run(3)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    for row in rows[1:]:
        assert row["rollout/valid"] == 16, "math-verify has scored every sample"
        assert row["off_policy/mismatch_kl"] < 1e-6
        assert 0 <= row["eval/pass@1"] <= 1
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").open()]
    assert all(sample["answer"].replace(",", "").lstrip("-")[0].isdigit() for sample in samples)
    assert all("final answer" in sample["prompt"] for sample in samples), "the system prompt"
    assert (tmp_path / "run" / "report.html").exists()
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
