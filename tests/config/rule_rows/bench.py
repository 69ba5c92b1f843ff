"""Combinations that the rules on benchmarks and plans find."""

from __future__ import annotations

from tests.config.rule_rows.row import Row

ROWS: list[Row] = [
    # benchmarks
    *[(f"bench {what}", flags, "error", "model.path model.shape")
      for what in ("engine", "train")
      for flags in ("model.path=null", "model.shape=qwen3-0.6b")],
    ("bench engine", "output=numbers.txt", "error", "output"),
    ("bench engine", "workload=uniforn", "error", "workload"),
    ("bench engine", "decode.batch=4", "warning", "decode.batch workload"),
    ("bench engine", "workload=decode decode.batch=300", "error",
     "decode.batch engine.max_num_seqs"),
    ("bench engine", "workload=decode decode.context=5000", "error",
     "decode.context model.path"),
    ("bench engine", "against=vllm engine.tensor_parallel_size=2", "error",
     "against engine.tensor_parallel_size"),
    ("bench engine", "against=vllm engine.weight_dtype=int8", "error",
     "against engine.weight_dtype"),
    ("bench train", "trainer.num_epochs=2 trainer.parity=off", "warning",
     "trainer.num_epochs trainer.parity"),
    ("bench train", "trainer.recompute=auto", "error", "trainer.recompute"),
    ("bench train", "rows.tokens=5000 trainer.max_tokens_per_microbatch=9000", "error",
     "rows.tokens model.path"),
    # the simulation
    ("plan", "output=numbers.txt", "error", "output"),
    ("plan", "plan.lengths.distribution=file", "error",
     "plan.lengths.distribution plan.lengths.path"),
    ("plan", "plan.lengths.path=train.jsonl", "warning",
     "plan.lengths.distribution plan.lengths.path"),
    ("plan", "cluster.num_references=8 algorithm.kl.coef=0.1", "error",
     "cluster.num_references plan.gpus"),
    ("plan", "plan.gpus=4 cluster.num_engines=4", "error",
     "plan.gpus cluster.num_engines"),
    ("plan", "cluster.num_nodes=2", "warning", "cluster.num_nodes"),
]  # fmt: skip
