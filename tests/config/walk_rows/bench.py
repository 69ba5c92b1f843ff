"""Rows of `hone bench`."""

from __future__ import annotations

from tests.config.row import Row
from tests.config.walk_rows.shared import (
    LORA,
    engine_rows,
    trainer_rows,
)

BENCH_ENGINE: dict[str, Row] = {
    "run.seed": Row("1", "requests"),
    "run.device": Row("cuda", "log:run.device is cuda, but torch sees no GPU"),
    "model.path": Row("other", "model"),
    "model.shape": Row("qwen3-1.7b", "model", ("--model.shape=qwen3-0.6b",)),
    "model.init": Row("random", "model"),
    "model.dtype": Row("bfloat16", "model"),
    "model.exact": Row("true", "log:model.exact"),
    **engine_rows("EmbeddedEngine", generates=True),
    "workload": Row("requests.jsonl", "requests"),
    "decode.batch": Row("1", "requests"),
    "decode.context": Row("12", "requests"),
    "decode.steps": Row("6", "requests"),
    "against": Row("vllm", "log:against=vllm|against is vllm"),
    "output": Row("other.json", "files"),
}
BENCH_TRAIN: dict[str, Row] = {
    **{key: row for key, row in BENCH_ENGINE.items() if key.startswith(("run.", "model."))},
    "run.seed": Row("1", "model"),
    "model.shape": Row(
        "qwen3-1.7b",
        "model",
        ("--model.shape=qwen3-0.6b", "--model.dtype=bfloat16", *LORA),  # to fit a small host
    ),
    "model.lora.rank": Row("2", "numbers"),
    "model.lora.alpha": Row("64", "adapt", LORA),
    "model.lora.target_modules": Row("[q_proj]", "numbers", LORA),
    "model.lora.load_in_4bit": Row("true", "model", LORA),
    **{
        key: Row(row.value, "passes" if row.shows == "passes" else "Trainer")
        for key, row in trainer_rows("metrics", rl=True).items()
    },
    "trainer.max_tokens_per_forward": Row("24", "Trainer"),  # no pass without gradients
    "trainer.offload_activations": Row("true", "Trainer", ("--trainer.recompute=full",)),
    "trainer.offload": Row("gradients", "Trainer"),
    **{
        f"trainer.{name}": Row(value, f"log:trainer.{name}")
        for name, value in (
            ("matmul_precision", "fp8"),
            ("parallel.fsdp_size", "3"),
            ("parallel.tensor_parallel_size", "2"),
            ("parallel.expert_parallel_size", "2"),
            ("parallel.pipeline_parallel_size", "2"),
            ("parallel.virtual_stages", "2"),
            ("parallel.ulysses_size", "2"),
            ("parallel.ring_size", "2"),
        )
    },
    **{
        f"trainer.{name}": Row(value, f"log:trainer.{name.partition('.')[0]}.* and has no effect")
        for name, value in (
            ("prompts_per_minibatch", "2"),
            ("num_epochs", "2"),
            ("enable_sleep", "true"),
            ("parity", "off"),
        )
    },
    "objective": Row("sft", "Trainer"),
    "rows.per_step": Row("3", "numbers"),
    "rows.tokens": Row("12", "numbers"),
    "steps": Row("2", "steps"),
    "warmup_steps": Row("2", "steps"),
    "output": Row("other.json", "files"),
}
