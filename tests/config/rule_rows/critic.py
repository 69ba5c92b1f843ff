"""Combinations that the rules on a critic's sizes find."""

from __future__ import annotations

from tests.config.rule_rows.row import Row

_APART = "algorithm.advantage=gae cluster.num_critics"
_SIZES = "critic.parallel"

ROWS: list[Row] = [
    # where it has no processes of its own
    ("rl", f"{_SIZES}.ring_size=2", "warning", f"{_SIZES}.ring_size algorithm.advantage"),
    ("rl", f"algorithm.advantage=gae {_SIZES}.fsdp_size=1", "error",
     f"{_SIZES}.fsdp_size cluster.num_critics"),
    ("rl", f"algorithm.advantage=gae {_SIZES}.zero_stage=0 {_SIZES}.ring_size=1", "error",
     f"{_SIZES}.zero_stage {_SIZES}.ring_size cluster.num_critics"),
    ("plan", f"algorithm.advantage=gae {_SIZES}.fsdp_size=1", "error",
     f"{_SIZES}.fsdp_size cluster.num_critics"),
    # sizes that do not make up its number of processes
    ("rl", f"{_APART}=3 cluster.num_trainers=2 trainer.parallel.ulysses_size=2", "error",
     "cluster.num_critics trainer.parallel.ulysses_size"),
    ("rl", f"{_APART}=3 {_SIZES}.ring_size=2", "error",
     f"cluster.num_critics {_SIZES}.ring_size"),
    ("rl", f"{_APART}=2 cluster.num_trainers=2 trainer.parallel.tensor_parallel_size=2 "
     f"{_SIZES}.ring_size=2", "error",
     f"cluster.num_critics {_SIZES}.ring_size trainer.parallel.tensor_parallel_size"),
    ("rl", f"{_APART}=2 {_SIZES}.pipeline_parallel_size=2 {_SIZES}.fsdp_size=2", "error",
     f"cluster.num_critics {_SIZES}.pipeline_parallel_size {_SIZES}.fsdp_size"),
    ("plan", f"{_APART}=3 {_SIZES}.ring_size=2", "error",
     f"cluster.num_critics {_SIZES}.ring_size"),
    ("rl", f"{_APART}=24 model.path=qwen3_moe {_SIZES}.expert_parallel_size=8 "
     f"{_SIZES}.fsdp_size=3", "error",
     f"{_SIZES}.expert_parallel_size {_SIZES}.fsdp_size"),
    ("rl", f"{_APART}=1 {_SIZES}.zero_stage=1", "warning",
     f"{_SIZES}.zero_stage cluster.num_critics"),
    # what its model cannot have
    ("rl", f"{_APART}=4 {_SIZES}.tensor_parallel_size=4", "error",
     f"{_SIZES}.tensor_parallel_size model.path"),
    ("rl", f"{_APART}=2 {_SIZES}.tensor_parallel_size=2 model.path=gemma2", "error",
     f"{_SIZES}.tensor_parallel_size model.path"),
    ("rl", f"{_APART}=2 {_SIZES}.tensor_parallel_size=2 critic.path=gemma2", "error",
     f"{_SIZES}.tensor_parallel_size critic.path"),
    ("rl", "--nproc=2 algorithm.advantage=gae trainer.parallel.tensor_parallel_size=2 "
     "critic.path=gemma2", "error", "trainer.parallel.tensor_parallel_size critic.path"),
    ("rl", f"{_APART}=2 {_SIZES}.expert_parallel_size=2", "error",
     f"{_SIZES}.expert_parallel_size model.path"),
    ("rl", "--nproc=2 algorithm.advantage=gae model.path=qwen3_moe critic.path=model "
     "trainer.parallel.expert_parallel_size=2", "error",
     "trainer.parallel.expert_parallel_size critic.path"),
    ("rl", f"{_APART}=3 {_SIZES}.expert_parallel_size=3 model.path=qwen3_moe", "error",
     f"{_SIZES}.expert_parallel_size model.path"),
    ("rl", f"{_APART}=3 {_SIZES}.pipeline_parallel_size=3", "error",
     f"{_SIZES}.pipeline_parallel_size model.path"),
    ("rl", f"{_APART}=2 {_SIZES}.pipeline_parallel_size=2 critic.path=mixtral", "error",
     f"{_SIZES}.pipeline_parallel_size critic.path"),
    ("rl", f"{_APART}=3 {_SIZES}.ulysses_size=3", "error",
     f"{_SIZES}.ulysses_size model.path"),
    ("rl", f"{_APART}=4 {_SIZES}.ulysses_size=4 critic.path=hybrid", "error",
     f"{_SIZES}.ulysses_size critic.path"),
    ("rl", f"{_APART}=2 {_SIZES}.ring_size=2 critic.path=hybrid", "error",
     f"{_SIZES}.ring_size critic.path"),
    ("rl", f"{_APART}=2 {_SIZES}.ring_size=2 model.path=hybrid", "error",
     f"{_SIZES}.ring_size model.path"),
    ("rl", "--nproc=2 algorithm.advantage=gae trainer.parallel.ring_size=2 critic.path=hybrid",
     "error", "trainer.parallel.ring_size critic.path"),
    # what a teacher cannot have, beside a policy that can
    ("rl", "--nproc=2 trainer.parallel.tensor_parallel_size=2 teacher.path=one_key_head", "error",
     "trainer.parallel.tensor_parallel_size teacher.path"),
    ("rl", "--nproc=2 trainer.parallel.tensor_parallel_size=2 teacher.path=gemma2", "error",
     "trainer.parallel.tensor_parallel_size teacher.path"),
    ("rl", "--nproc=2 model.path=qwen3_moe trainer.parallel.expert_parallel_size=2 "
     "teacher.path=model", "error", "trainer.parallel.expert_parallel_size teacher.path"),
    ("rl", "--nproc=4 trainer.parallel.ulysses_size=4 teacher.path=three_heads", "error",
     "trainer.parallel.ulysses_size teacher.path"),
    ("rl", "--nproc=4 trainer.parallel.ulysses_size=4 trainer.parallel.reference_ulysses_size=2 "
     "teacher.path=three_heads", "error",
     "trainer.parallel.reference_ulysses_size teacher.path"),
    ("rl", "--nproc=2 trainer.parallel.reference_ring_size=2 teacher.path=hybrid", "error",
     "trainer.parallel.reference_ring_size teacher.path"),
    ("rl", "--nproc=2 trainer.parallel.ring_size=2 teacher.path=hybrid", "error",
     "trainer.parallel.ring_size teacher.path"),
    ("rl", "--nproc=4 trainer.parallel.ulysses_size=4 teacher.path=hybrid", "error",
     "trainer.parallel.ulysses_size teacher.path"),
    ("rl", "--nproc=4 trainer.parallel.reference_ring_size=3 teacher.path=one_key_head", "error",
     "trainer.parallel.reference_ring_size trainer.parallel.tensor_parallel_size"),
    # what it computes and holds
    ("rl", f"--gpu=H200 {_APART}=2 {_SIZES}.tensor_parallel_size=2 trainer.matmul_precision=fp8",
     "error", f"trainer.matmul_precision {_SIZES}.tensor_parallel_size"),
    ("rl", f"{_APART}=2 critic.offload=parameters {_SIZES}.zero_stage=1", "error",
     f"critic.offload {_SIZES}.zero_stage"),
    ("rl", f"{_APART}=2 critic.offload=parameters", "error",
     "critic.offload trainer.parallel.zero_stage"),
    ("rl", f"--nproc=2 {_APART}=2 cluster.num_trainers=2 trainer.offload=parameters "
     f"trainer.parallel.zero_stage=3 {_SIZES}.zero_stage=2", "error",
     f"trainer.offload {_SIZES}.zero_stage"),
    ("rl", "algorithm.advantage=gae critic.max_tokens_per_microbatch=8", "error",
     "critic.max_tokens_per_microbatch data.max_prompt_tokens rollout.max_completion_tokens"),
    ("rl", f"{_APART}=2 {_SIZES}.ring_size=2 critic.max_tokens_per_microbatch=1023", "error",
     "critic.max_tokens_per_microbatch data.max_prompt_tokens rollout.max_completion_tokens"),
    ("rl", f"{_APART}=1 cluster.num_trainers=2 trainer.parallel.ring_size=2 {_SIZES}.ring_size=1 "
     "trainer.max_tokens_per_microbatch=1024", "error",
     "trainer.max_tokens_per_microbatch data.max_prompt_tokens"),
    ("rl", f"{_APART}=1 cluster.num_trainers=2 trainer.parallel.ring_size=2 {_SIZES}.ring_size=1 "
     "trainer.max_tokens_per_microbatch=2048 trainer.max_tokens_per_forward=1024", "error",
     "trainer.max_tokens_per_forward data.max_prompt_tokens"),
]  # fmt: skip
