"""GRPO from hone's own parts: a tiny model learns to add three digits, in a minute on a CPU.

    hone quickstart            # once: makes the model and the sums that are named below
    python examples/loop.py

Each step samples eight answers to each of 32 sums and gives a right answer the reward 1. Answers
that earned more than the mean of their sum become likelier. `hone rl` is this loop with
checkpoints, reports, several GPUs and sampling ahead of the training.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean

import hone

# A real model goes here, with a lower rate: "Qwen/Qwen3-0.6B", 1e-6. A GPU is used if there is one.
MODEL, LEARNING_RATE = "runs/quickstart/sft/model", 5e-4
STEPS, PROMPTS_PER_STEP, SAMPLES_PER_PROMPT, MAX_TOKENS = 60, 32, 8, 6
OUTPUT = "runs/loop/model"


def correct(completion: str, answer: str) -> float:
    """The reward of a sample: whether its first word is the answer of the row."""
    return float(completion.split()[:1] == [answer])


def mean_reward(samples: Iterable[hone.Sample]) -> float:
    """The mean over samples that could be scored."""
    return fmean(sample.reward.total for sample in samples if sample.reward is not None)


def main() -> None:
    model_config = hone.ModelConfig(path=MODEL)
    tokenizer = hone.load_tokenizer(model_config)
    data_config = hone.DataConfig(
        train=(hone.SourceConfig(path="runs/quickstart/train.jsonl"),),
        eval=(hone.SourceConfig(path="runs/quickstart/eval.jsonl"),),
        chat="never",
    )
    data = hone.load_prompts(data_config, tokenizer)

    model = hone.load_model(model_config)
    sampled = hone.alias_module(model)  # the engine reads the weights that the trainer changes
    ends = hone.eos_token_ids(model, tokenizer)

    algorithm = hone.GRPO(hone.AlgorithmConfig(), max_completion_tokens=MAX_TOKENS)
    trainer = hone.Trainer(
        model,
        hone.TrainerConfig(optimizer=hone.OptimizerConfig(lr=LEARNING_RATE)),
        algorithm.objectives["policy"],
        total_steps=STEPS,
    )
    engine = hone.Engine(sampled, hone.EngineConfig(), eos_token_ids=ends)
    weights = hone.WeightSync(trainer, engine)
    collector = hone.Collector(
        engine,
        hone.Scorer.in_process(correct, max_completion_tokens=MAX_TOKENS),
        data.train,
        hone.RolloutConfig(
            prompts_per_step=PROMPTS_PER_STEP,
            n_samples_per_prompt=SAMPLES_PER_PROMPT,
            max_completion_tokens=MAX_TOKENS,
        ),
        decode=hone.decoder(tokenizer, ends),
    )

    def evaluate() -> float:
        config = hone.EvaluationConfig(max_completion_tokens=MAX_TOKENS)
        return mean_reward(collector.evaluate(data.eval, config) or [])

    weights.push(version=0)  # proves that the engine holds what the trainer holds
    print(f"held-out reward {evaluate():.3f} before training")
    for step in range(1, STEPS + 1):
        groups = collector.collect(step)  # samples of weights `step - 1`, with their rewards
        rows = algorithm.rows(groups, version=step - 1)  # token ids, masks, log-probabilities
        algorithm.targets(rows, groups)  # adds the advantages
        metrics = hone.to_scalars(trainer.update(rows))
        weights.push(version=step)
        reward = mean_reward(sample for group in groups for sample in group.samples)
        print(f"step {step:3}  reward {reward:.3f}  entropy {metrics['policy/entropy']:.3f}")
    print(f"held-out reward {evaluate():.3f} after training")
    trainer.export_hf(OUTPUT, tokenizer)


if __name__ == "__main__":
    main()
