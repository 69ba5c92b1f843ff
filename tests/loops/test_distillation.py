"""Distillation: whole runs with a teacher, alone, in several processes and ahead of training."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.loops.conftest import MakeConfig
from tests.loops.test_processes import assert_same_run, run_hone
from tests.tiny_runs import learning_config, lines
from transformers import AutoModelForCausalLM

from hone.algorithms.distillation import DivergingFromTeacher
from hone.data.arithmetic import ALPHABET
from hone.errors import UserError
from hone.loops import reinforce
from hone.models.tiny import make_char_tokenizer, make_tiny_model
from hone.types import Row


def make_teacher(
    folder: Path, alphabet: str = ALPHABET, *, family: str = "qwen3", seed: int = 7
) -> str:
    """A larger model with the tokens of the policy's, which is sure of what it says."""
    make_tiny_model(
        folder,
        tokenizer=make_char_tokenizer(alphabet),
        family=family,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        hidden_size=48,
        intermediate_size=64,
        max_position_embeddings=64,
        seed=seed,
    )
    file = folder / "model.safetensors"
    scaled = {name: 6 * w if w.dim() == 2 else w for name, w in load_file(file).items()}
    save_file(scaled, file, metadata={"format": "pt"})
    return str(folder)


def metrics(run_dir: Path, name: str = "teacher/kl") -> list[float]:
    return [row[name] for row in lines(run_dir / "metrics.jsonl") if name in row]


def test_the_columns_are_what_the_teacher_says(make_config: MakeConfig, tmp_path: Path) -> None:
    """Of the policy's own tokens, in float64 and one row at a time."""
    found: list[Row] = []
    path = make_teacher(tmp_path / "teacher", family="llama")
    cfg = make_config(
        run={"steps": 1},
        rollout={"temperature": 0.7},
        teacher={"path": path, "reward_coef": 0.5},
        log={"samples_per_step": 99},
    )
    with pytest.MonkeyPatch.context() as patch:
        targets = reinforce.algorithm_of(cfg).__class__.targets

        def watched(self: Any, rows: Any, batch: Any) -> Any:
            found.extend(rows)
            return targets(self, rows, batch)

        patch.setattr("hone.algorithms.distillation.Distillation.targets", watched)
        reinforce.run(cfg)
    teacher = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    assert len(found) == 16
    for row in found:
        ids = torch.tensor([row.token_ids])
        logits = teacher(ids).logits[0, :-1].double() / 0.7
        logprobs = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        expected = logprobs[torch.tensor(row.loss_mask[1:])]
        torch.testing.assert_close(
            row.column("logprobs/teacher").double(), expected.detach(), atol=1e-4, rtol=1e-4
        )
    (row,) = lines(cfg.run.dir / "metrics.jsonl")
    gaps = torch.cat([r.column("logprobs/policy") - r.column("logprobs/teacher") for r in found])
    assert row["teacher/kl"] == pytest.approx(float(gaps.mean()), abs=1e-5)


@pytest.mark.parametrize("loss", ["reverse_kl", "forward_kl", "js"])
def test_the_loss_is_the_divergence_of_both_distributions(
    loss: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    """Of all words, in float64, at the temperature that samples; tokens are averaged."""
    found: list[Row] = []
    path = make_teacher(tmp_path / "teacher", family="llama")
    cfg = make_config(
        run={"steps": 1},
        rollout={"temperature": 0.7},
        teacher={"path": path, "loss": loss, "top_k": 99},
    )
    with pytest.MonkeyPatch.context() as patch:
        targets = DivergingFromTeacher.targets

        def watched(self: Any, rows: Any, batch: Any) -> Any:
            found.extend(rows)
            return targets(self, rows, batch)

        patch.setattr(DivergingFromTeacher, "targets", watched)
        reinforce.run(cfg)
    models = [
        AutoModelForCausalLM.from_pretrained(name, dtype=torch.float64)
        for name in (cfg.model.path, path)
    ]
    values: list[torch.Tensor] = []
    for row in found:
        ids, mask = torch.tensor([row.token_ids]), torch.tensor(row.loss_mask[1:])
        with torch.no_grad():
            own, other = (m(ids).logits[0, :-1].div(0.7).log_softmax(-1)[mask] for m in models)
        mean = ((own.exp() + other.exp()) / 2).log()
        kl = torch.nn.functional.kl_div  # of (input, target): target.exp() * (target - input)
        pairs = {"reverse_kl": [(other, own)], "forward_kl": [(own, other)]}
        pairs["js"] = [(mean, own), (mean, other)]
        both = [kl(a, b, reduction="none", log_target=True).sum(-1) for a, b in pairs[loss]]
        values.append(sum(both) / torch.tensor(len(both)))
    (row,) = lines(cfg.run.dir / "metrics.jsonl")
    expected = float(torch.cat(values).mean())
    assert row["teacher/divergence"] == pytest.approx(expected, rel=1e-3)
    assert row["train/loss"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "loss"),
    [
        ("qwen3", "policy_gradient"),
        ("llama", "policy_gradient"),
        ("qwen3", "js"),
        ("qwen3", "forward_kl"),
    ],
)
def test_R24_two_processes_are_one_run(
    family: str, loss: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    sections: dict[str, Any] = {
        "teacher": {"path": make_teacher(tmp_path / "teacher", family=family), "loss": loss},
        "trainer": {"prompts_per_minibatch": 2, "optimizer": {"lr": 3e-3, "eps": 1e-5}},
        "log": {"samples_per_step": 99},
    }
    one = make_config(run={"dir": tmp_path / "one"}, **sections)
    reinforce.run(one)
    two = make_config(run={"dir": tmp_path / "two"}, **sections)
    flags = ("--trainer.parallel.ring_size", "2") if loss == "forward_kl" else ()
    run_hone("rl", two, tmp_path, "--nproc", "2", *flags)
    assert_same_run(one.run.dir, two.run.dir)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sections",
    [
        {"pipeline": {"max_staleness": 1}, "algorithm": {"correction": {"kind": "tis"}}},
        {
            "model": {"path": "student", "lora": {"rank": 16}},
            "algorithm": {"kl": {"coef": 1e-3}},
            "trainer": {"optimizer": {"lr": 0.02}, "logits_chunk_tokens": 64},
        },
        {"rollout": {"n_samples_per_prompt": 1, "prompts_per_step": 64}},
        {"teacher": {"loss": "reverse_kl", "top_k": 4}},
        {"teacher": {"loss": "forward_kl"}},
        {"teacher": {"loss": "js", "reward_coef": 0.1}},
    ],
    ids=[
        "ahead of training",
        "adapters and a reference",
        "one sample of a prompt",
        "reverse KL of four words",
        "forward KL",
        "Jensen-Shannon and rewards",
    ],
)
def test_the_divergence_from_the_teacher_falls(
    sections: dict[str, Any],
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    make_teacher(Path("student"), seed=1)  # whose head, which adapters leave, can be sure as well
    cfg = make_config(
        **{
            "run": {"steps": 40},
            "rollout": {"prompts_per_step": 16} | sections.get("rollout", {}),
            "engine": {"max_num_seqs": 64},
            "teacher": {"path": make_teacher(tmp_path / "teacher")} | sections.get("teacher", {}),
            "trainer": {"optimizer": {"lr": 1e-2}, "logits_chunk_tokens": 64},
        }
        | {k: held for k, held in sections.items() if k not in ("rollout", "teacher")}
    )
    reinforce.run(cfg)
    name = "teacher/divergence" if "teacher" in sections else "teacher/kl"
    divergences = metrics(cfg.run.dir, name)
    assert len(divergences) == 40
    assert sum(divergences[-5:]) < 0.6 * sum(divergences[:5]), divergences


@pytest.mark.parametrize(
    ("alphabet", "said"),
    [
        ("0123456789", "tokens differ, the first is"),
        ("9876543210", "token"),
    ],
)
@pytest.mark.parametrize("role", ["teacher", "critic"])
def test_a_model_with_other_tokens_is_refused(
    alphabet: str, said: str, role: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    path = make_teacher(tmp_path / "other", alphabet=alphabet)
    advantage = {"algorithm": {"advantage": "gae"}} if role == "critic" else {}
    cfg = make_config(**{role: {"path": path}}, **advantage)
    with pytest.raises(UserError, match=f"{role}.path=.* has another tokenizer") as caught:
        reinforce.run(cfg)
    assert said in str(caught.value)
    assert not (cfg.run.dir / "metrics.jsonl").exists(), "before anything is sampled"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_student_reaches_its_teacher_in_fewer_updates_than_by_rewards(
    seed: int, inputs: Path, tmp_path: Path
) -> None:
    """The teacher is what the rewards made of the student; both see as many samples an update."""
    reinforce.run(learning_config(inputs, tmp_path / "rl", seed=seed))
    by_rewards = metrics(tmp_path / "rl", "reward/mean")
    path = str(tmp_path / "rl" / "model")
    reinforce.run(learning_config(inputs, tmp_path / "student", seed=seed, teacher={"path": path}))
    by_teacher = metrics(tmp_path / "student", "reward/mean")
    level = by_rewards[0] + 0.8 * (sum(by_rewards[-3:]) / 3 - by_rewards[0])
    first = [updates_until(level, rewards) for rewards in (by_teacher, by_rewards)]
    assert first[0] < first[1], (first, by_teacher, by_rewards)
    divergences = metrics(tmp_path / "student")
    assert divergences[-1] < 0.2 * divergences[0], divergences


def updates_until(level: float, rewards: list[float]) -> int:
    """Updates before a step whose samples, and those of the next, earn `level`."""
    levels = map(min, pairwise(rewards))
    return next((n for n, least in enumerate(levels) if least >= level), len(rewards))
