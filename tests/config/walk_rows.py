"""The table of the walk: each key of each tree, and what it changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tests.config.walk import Row

CHAT = ("--data.chat=always", "--data.max_prompt_tokens=24")
COLUMNS = ("--data.train=[{path: columns.jsonl, max_rows: 8}]",)
TOLD = ("--reward.functions=[{fn: 'rewards.py:told'}]",)
EVAL_COLUMNS = ("--data.eval=[{path: columns.jsonl, max_rows: 4}]",)
BOTH = ("--data.train=[{path: train.jsonl}, {path: columns.jsonl}]",)
HUB = ("--data.train=[{path: owner/name}]",)
EVAL_HUB = ("--data.eval=[{path: owner/name, max_rows: 4}]",)
SPLIT = ("--data.train=[{path: split}]",)
EVAL_SPLIT = ("--data.eval=[{path: split}]",)
ECHO = ("--env.path=envs.py:Echo", "--rollout.stop=['1', '2', '3', '4']")
WHOLE_GROUPS = Row("true", "metrics", ("--reward.functions=[{fn: 'rewards.py:of_lists'}]",))
EXACT_MATCH = ("--reward.functions=[{fn: exact_match}]",)
LORA = ("--model.lora.rank=2",)
GAE = ("--algorithm.advantage=gae", "--critic.lr=1e-3")
KL = ("--algorithm.kl.coef=0.1",)
JUDGE = ("--reward.model.path=judge",)
TEACHER = ("--teacher.path=other",)
MINI = ("--trainer.prompts_per_minibatch=2", "--trainer.num_epochs=2")
MUON = ("--trainer.optimizer.name=muon",)
EIGHT = ("--run.device=cuda", "--model.path=Qwen/Qwen3-8B", "--nproc=8")
APART = ("--cluster.num_engines=2", "--algorithm.correction.kind=tis")
AHEAD = (*APART, "--pipeline.max_staleness=1")
PARTIAL = ("--rollout.oversample_prompts=2",)
TRACED = ("--profile.train.steps=[0]",)
TRACED_ENGINE = ("--profile.rollout.steps=[0]",)
OFF = "log:has no effect|is not used|needs|not for|"


def run_rows(*, trains: bool, has_dir: bool = True) -> dict[str, Row]:
    rows = {
        "run.seed": Row("1", "samples"),
        "run.device": Row("cuda", "log:run.device is cuda, but torch sees no GPU"),
    }
    if has_dir:
        rows["run.dir"] = Row("elsewhere", "files")
    if trains:
        rows |= {
            "run.steps": Row("1", "metrics"),
            "run.resume": Row("never", "log:run.resume is never", before=("--run.steps=1",)),
        }
    return rows


def model_rows(shown: str, *, lora: bool, chat: tuple[str, ...] = CHAT) -> dict[str, Row]:
    rows = {
        "model.path": Row("other", shown),
        "model.tokenizer": Row("tokenizer", shown, EXACT_LETTERS),
        "model.chat_template": Row("template.jinja", shown, chat),
        "model.init": Row("random", shown),
        "model.dtype": Row("bfloat16", shown),
        "model.exact": Row("true", "log:model.exact"),
        "model.trust_remote_code": Row("true", "AutoModelForCausalLM.from_pretrained"),
    }
    if lora:
        rows |= {
            "model.lora.rank": Row("2", "files"),
            "model.lora.alpha": Row("64", shown, LORA),
            "model.lora.target_modules": Row("[q_proj]", shown, LORA),
            "model.lora.load_in_4bit": Row("true", shown, LORA),
        }
    return rows


EXACT_LETTERS: tuple[str, ...] = ()


def source_rows(section: str, shown: str, columns: Mapping[str, Row]) -> dict[str, Row]:
    """Keys of the first source of a section, as `data.train`."""
    train = section == "train"
    key = f"data.{section}"
    return {
        key: Row("[{path: columns.jsonl, max_rows: 3, columns: {answer: answer}}]", shown),
        f"{key}.0.path": Row("split/train.jsonl", shown),
        f"{key}.0.split": Row("test", shown, SPLIT if train else EVAL_SPLIT),
        f"{key}.0.subset": Row("main", "datasets.load_dataset", HUB if train else EVAL_HUB),
        f"{key}.0.max_rows": Row("3", shown),
    } | {f"{key}.0.{name}": row for name, row in columns.items()}


RL: dict[str, Row] = {
    **run_rows(trains=True),
    **model_rows("metrics", lora=True),
    **source_rows(
        "train",
        "samples",
        {
            "weight": Row("5", "samples", BOTH),
            "columns.prompt": Row("q", "samples", COLUMNS),
            "columns.answer": Row("a", "samples", COLUMNS),
            "columns.task": Row("kind", "samples", COLUMNS),
            "answer_pattern": Row("^.", "samples", ("--data.train=[{path: train.jsonl}]",)),
            "task": Row("sums", "samples"),
        },
    ),
    **source_rows(
        "eval",
        "metrics",
        {
            "columns.prompt": Row("q", "metrics", (*EVAL_COLUMNS, *TOLD)),
            "columns.answer": Row("a", "metrics", (*EVAL_COLUMNS, *TOLD)),
            "columns.task": Row("kind", "metrics", (*EVAL_COLUMNS, *TOLD)),
            "answer_pattern": Row("^nothing", "log:answer_pattern"),
            "task": Row("sums", "metrics", TOLD),
        },
    ),
    "data.eval_fraction": Row("0.5", "metrics", ("--data.eval=[]", "--eval.every_n_steps=0")),
    "data.shuffle": Row("false", "samples"),
    "data.chat": Row("always", "samples", ("--data.max_prompt_tokens=24",)),
    "data.system_prompt": Row("1", "samples", CHAT),
    "data.prompt_template": Row("1{prompt}", "samples"),
    "data.max_prompt_tokens": Row("3", "log:too long"),
    "data.overlong_prompts": Row("error", "log:raise the limit", ("--data.max_prompt_tokens=3",)),
    "rollout.max_completion_tokens": Row("4", "samples"),
    "rollout.temperature": Row("0.5", "samples"),
    "rollout.stop": Row("['1', 5, 6]", "samples"),
    "rollout.prompts_per_step": Row("3", "metrics"),
    "rollout.n_samples_per_prompt": Row("3", "metrics"),
    "rollout.dynamic_sampling": Row("true", "metrics", EXACT_MATCH),
    "rollout.reward_range": Row("[0.5, 1]", "metrics", ("--rollout.dynamic_sampling=true",)),
    "rollout.oversample_prompts": Row("2", "metrics"),
    "rollout.max_aborted_count": Row("0", "metrics", (*PARTIAL, "--run.steps=4")),
    "rollout.mask_off_policy_tokens": Row("true", "metrics", (*PARTIAL, "--run.steps=4")),
    "rollout.truncated_samples": Row("mask", "metrics"),
    "engine.backend": Row("vllm", "log:vllm"),
    "engine.gpu_memory_utilization": Row("0.3", "EmbeddedEngine"),  # a share of a GPU's memory
    "engine.kv_cache_gib": Row("0.001", "metrics"),
    "engine.kv_cache_dtype": Row("fp8", "metrics", ("--trainer.parity=1",)),
    "engine.tensor_parallel_size": Row("2", "log:tensor_parallel_size"),
    "engine.max_num_seqs": Row("4", "metrics", ("--engine.kv_cache_gib=0.01",)),
    "engine.max_num_batched_tokens": Row("8", "metrics"),
    "engine.enable_sleep": Row("true", "EmbeddedEngine.sleep"),
    "engine.enable_prefix_caching": Row("false", "EmbeddedEngine"),
    "engine.enforce_eager": Row("true", "EmbeddedEngine"),  # of a GPU alone
    "env.path": Row("envs.py:Echo", "metrics"),
    "env.args": Row("{says: '-+'}", "samples", ECHO),
    "env.max_turns": Row("2", "metrics", ECHO),
    "reward.functions": Row("[{fn: 'rewards.py:nine'}]", "metrics"),
    "reward.functions.0.fn": Row("rewards.py:nine", "metrics"),
    "reward.functions.0.weight": Row("2", "metrics"),
    "reward.functions.0.args": Row(
        "{mark: '1'}", "metrics", ("--reward.functions=[{fn: 'rewards.py:nine'}]",)
    ),
    "reward.functions.0.whole_groups": WHOLE_GROUPS,
    "reward.clip": Row("[0.2, 0.6]", "metrics"),
    "reward.model.path": Row("judge", "metrics"),
    "reward.model.weight": Row("2", "metrics", JUDGE),
    "reward.model.max_tokens_per_forward": Row("16", "passes", JUDGE),
    "reward.timeout_s": Row(
        "0.1",
        "metrics",
        (
            "--reward.functions=[{fn: 'rewards.py:slow'}]",
            "--run.steps=1",
            "--rollout.prompts_per_step=1",
            "--rollout.n_samples_per_prompt=2",
            "--reward.max_failure_rate=1",
            "--eval.every_n_steps=0",
        ),
    ),
    "reward.memory_limit_gib": Row(
        "0.2",
        "metrics",
        (
            "--reward.functions=[{fn: 'rewards.py:big'}]",
            "--run.steps=1",
            "--reward.max_failure_rate=1",
            "--eval.every_n_steps=0",
        ),
    ),
    "reward.num_workers": Row("2", "Scorer"),
    "reward.max_failure_rate": Row(
        "1",
        "exit",
        ("--reward.functions=[{fn: 'rewards.py:fails'}]", "--reward.max_failure_rate=0"),
    ),
    "algorithm.advantage": Row("rloo", "metrics"),
    "algorithm.gamma": Row("0.5", "metrics", GAE),
    "algorithm.lam": Row("0.5", "metrics", (*GAE, "--run.steps=3")),
    "teacher.path": Row("other", "metrics"),
    "teacher.reward_coef": Row("0.5", "metrics", TEACHER),
    "teacher.loss": Row("js", "metrics", TEACHER),
    "teacher.top_k": Row("3", "metrics", (*TEACHER, "--teacher.loss=forward_kl")),
    "critic.path": Row("other", "metrics", GAE),
    "critic.lr": Row("1e-2", "metrics", GAE),
    "critic.optimizer": Row("muon", "metrics", GAE),
    "critic.value_clip": Row("1e-6", "metrics", (*GAE, *MINI)),
    "critic.warmup_steps": Row("1", "weights", GAE),
    "critic.max_tokens_per_microbatch": Row("24", "metrics", GAE),
    "algorithm.loss": Row("cispo", "metrics", MINI),
    "algorithm.aggregation": Row("sequence_mean", "metrics"),
    "algorithm.clip_low": Row("0.0001", "metrics", MINI),
    "algorithm.clip_high": Row("0.0001", "metrics", MINI),
    "algorithm.dual_clip": Row("1.0001", "metrics", MINI),
    "algorithm.entropy_coef": Row("0.1", "metrics"),
    "algorithm.kl.coef": Row("0.1", "metrics"),
    "algorithm.kl.placement": Row("reward", "metrics", KL),
    "algorithm.kl.estimator": Row("k2", "metrics", KL),
    "algorithm.correction.kind": Row("tis", "metrics", (*PARTIAL, "--run.steps=3")),
    "algorithm.correction.low": Row(
        "0.999", "metrics", (*PARTIAL, "--run.steps=4", "--algorithm.correction.kind=icepop")
    ),
    "algorithm.correction.high": Row(
        "1.001", "metrics", (*PARTIAL, "--run.steps=4", "--algorithm.correction.kind=tis")
    ),
    "pipeline.max_staleness": Row("2", "derived", APART, command="check rl"),
    "pipeline.in_flight": Row("abort", "Collector", AHEAD),
}


def trainer_rows(shown: str, *, rl: bool) -> dict[str, Row]:
    long = "--rollout.max_completion_tokens=4096" if rl else "--data.max_tokens=4096"
    rows = {
        "trainer.max_tokens_per_microbatch": Row("24", "passes"),
        "trainer.max_tokens_per_forward": Row("24", "passes", MINI if rl else ()),
        "trainer.micro_batch_size": Row("1", "passes"),
        "trainer.recompute": Row("full", "derived", (*EIGHT, long), command="check rl"),
        "trainer.recompute_every_n_layers": Row("2", "findings", command="check rl"),
        "trainer.offload_activations": Row("true", "findings", command="check rl"),
        "trainer.offload": Row("optimizer", "findings", command="check rl"),
        "trainer.compile": Row("true", "torch.compile"),
        "trainer.matmul_precision": Row("fp8", "findings", command="check rl"),
        "trainer.logits_chunk_tokens": Row("2", shown),
        "trainer.optimizer.name": Row("muon", shown),
        "trainer.optimizer.lr": Row("1e-2", shown),
        "trainer.optimizer.betas": Row("[0.5, 0.5]", shown),
        "trainer.optimizer.eps": Row("1e-2", shown),
        "trainer.optimizer.weight_decay": Row("0.5", shown),
        "trainer.optimizer.muon_lr": Row("0.5", shown, MUON),
        "trainer.optimizer.state_dtype": Row("bfloat16", "weights"),
        "trainer.optimizer.max_grad_norm": Row("0.001", shown),
        "trainer.optimizer.schedule": Row("linear", shown),
        "trainer.optimizer.warmup_steps": Row("1", shown),
        "trainer.optimizer.min_lr_ratio": Row(
            "0.9", shown, ("--trainer.optimizer.schedule=linear",)
        ),
        "trainer.parallel.zero_stage": Row("3", "derived", EIGHT, command="check rl"),
        "trainer.parallel.fsdp_size": Row("3", "findings", EIGHT, command="check rl"),
        "trainer.parallel.tensor_parallel_size": Row("2", "derived", EIGHT, command="check rl"),
        "trainer.parallel.ulysses_size": Row("2", "derived", EIGHT, command="check rl"),
        "trainer.parallel.ring_size": Row("2", "derived", EIGHT, command="check rl"),
        "trainer.parallel.reference_ulysses_size": Row("2", "findings", EIGHT, command="check rl"),
        "trainer.parallel.reference_ring_size": Row("2", "findings", EIGHT, command="check rl"),
        "trainer.parallel.timeout_s": Row("5", "Watch"),
    }
    if rl:
        rows |= {
            "trainer.prompts_per_minibatch": Row("2", shown),
            "trainer.num_epochs": Row("2", shown),
            "trainer.enable_sleep": Row("true", "Trainer.sleep"),
            "trainer.parity": Row("1e-20", "exit"),
        }
    return rows


def cluster_rows() -> dict[str, Row]:
    return {
        "cluster.address": Row("localhost:9", "log:no Ray cluster", APART),
        "cluster.num_trainers": Row("2", "derived", APART, command="check rl"),
        "cluster.num_engines": Row("2", "derived", command="check rl"),
        "cluster.num_references": Row("2", "derived", KL, command="check rl"),
        "cluster.num_nodes": Row("2", "findings", APART, command="check rl"),
        "cluster.devices_per_node": Row("1", "findings", APART, command="check rl"),
        "cluster.update_weight_buffer_size": Row("1024", "BroadcastSync", APART),
        "cluster.engine_timeout_s": Row("7", "BroadcastSync", APART),
    }


def sampling_rows(section: str, shown: str) -> dict[str, Row]:
    return {
        f"{section}.max_completion_tokens": Row("4", shown),
        f"{section}.temperature": Row("0.5", shown),
        f"{section}.top_p": Row("0.5", shown),
        f"{section}.top_k": Row("2", shown),
        f"{section}.min_p": Row("0.5", shown),
    }


def eval_rows(shown: str) -> dict[str, Row]:
    return {
        **sampling_rows("eval", shown),
        "eval.n_samples_per_prompt": Row("2", shown),
        "eval.pass_function": Row("even", shown),
        "eval.pass_threshold": Row("0.1", shown, ("--eval.pass_function=even",)),
    }


def course_rows() -> dict[str, Row]:
    """When a run evaluates, saves and reports."""
    return {
        "eval.every_n_steps": Row("1", "metrics"),
        "eval.at_start": Row("true", "metrics"),
        "checkpoint.every_n_steps": Row("1", "files"),
        "checkpoint.keep_last": Row("1", "files", ("--checkpoint.every_n_steps=1",)),
        "checkpoint.keep_best": Row(
            "false",
            "files",
            (
                "--checkpoint.every_n_steps=1",
                "--checkpoint.keep_last=1",
                "--eval.every_n_steps=1",
                "--run.steps=3",
                "--trainer.optimizer.lr=1",
            ),
        ),
        "checkpoint.export_dtype": Row("bfloat16", "dtype"),
        "profile.dir": Row("elsewhere", "log:trace: elsewhere/train_trace", TRACED),
        "profile.train.steps": Row("[0]", "traces"),
        "profile.train.target": Row("train_actor", "traces", TRACED),
        "profile.train.with_stack": Row("true", "profile", TRACED),
        "profile.train.with_memory": Row("true", "profile", TRACED),
        "profile.train.with_flops": Row("true", "profile", TRACED),
        "profile.memory.recorder": Row("memray", "log:of 2 steps, are in .*memray.bin"),
        "profile.memory.after_steps": Row(
            "1", "log:of 1 steps", ("--profile.memory.recorder=memray",)
        ),
        "log.to": Row("[tensorboard]", "files"),
        "log.project": Row("mine", "wandb.init", ("--log.to=[wandb]",)),
        "log.metrics_port": Row("61917", "log:served at http"),
        "log.samples_per_step": Row("1", "samples"),
    }


RL |= trainer_rows("metrics", rl=True) | cluster_rows() | eval_rows("metrics") | course_rows()
RL |= {
    "profile.rollout.steps": Row("[0]", "traces"),
    "profile.rollout.num_forwards": Row("1", "traces", TRACED_ENGINE),
    "profile.rollout.activities": Row("[gpu]", "log:no GPU to record", TRACED_ENGINE),
    "profile.rollout.by_stage": Row("true", "traces", TRACED_ENGINE),
    "profile.rollout.with_stack": Row("true", "profile", TRACED_ENGINE),
    "profile.rollout.record_shapes": Row("true", "profile", TRACED_ENGINE),
}
RL["checkpoint.keep_best"] = Row(
    "false",
    "files",
    (
        "--checkpoint.every_n_steps=1",
        "--checkpoint.keep_last=1",
        "--eval.every_n_steps=1",
        "--trainer.optimizer.lr=0.1",
        "--reward.functions=[{fn: 'rewards.py:even', weight: -1}]",
        "--eval.metric=eval/reward/even/mean",  # falls, so that the first step is the best
    ),
)
RL["eval.metric"] = Row(
    "eval/length/mean",
    "files",
    (
        "--checkpoint.every_n_steps=1",
        "--checkpoint.keep_last=1",
        "--eval.every_n_steps=1",
        "--run.steps=3",
    ),
)

SFT_COLUMNS = ("--data.train=[{path: columns.jsonl, max_rows: 8}]",)
SFT_EVAL_COLUMNS = ("--data.eval=[{path: columns.jsonl, max_rows: 4}]",)
SFT_BOTH = ("--data.train=[{path: train.jsonl, columns: {answer: answer}}, {path: columns.jsonl}]",)
SFT_HUB = ("--data.train=[{path: owner/name, columns: {answer: answer}}]",)
SFT_EVAL_HUB = ("--data.eval=[{path: owner/name, max_rows: 4, columns: {answer: answer}}]",)
SFT_SPLIT = ("--data.train=[{path: split, columns: {answer: answer}}]",)
SFT_EVAL_SPLIT = ("--data.eval=[{path: split, columns: {answer: answer}}]",)


def not_used(key: str, value: str) -> Row:
    return Row(value, f"log:{key} is .*and has no effect")


def sft_sources(section: str) -> dict[str, Row]:
    is_train, key = section == "train", f"data.{section}.0"
    columns = SFT_COLUMNS if is_train else SFT_EVAL_COLUMNS
    rows = source_rows(
        section,
        "metrics",
        {
            "weight": Row("5", "metrics", SFT_BOTH),
            "columns.prompt": Row("q", "metrics", columns),
            "columns.answer": Row("c", "metrics", columns),
            "columns.task": not_used(f"{key}.columns.task", "kind"),
            "answer_pattern": not_used(f"{key}.answer_pattern", "^."),
            "task": not_used(f"{key}.task", "sums"),
        },
    )
    rows[f"{key}.split"] = Row("test", "metrics", SFT_SPLIT if is_train else SFT_EVAL_SPLIT)
    hub = SFT_HUB if is_train else SFT_EVAL_HUB
    rows[f"{key}.subset"] = Row("main", "datasets.load_dataset", hub)
    if not is_train:
        del rows[f"{key}.weight"]
    return rows


SFT: dict[str, Row] = {
    **run_rows(trains=True),
    **model_rows("metrics", lora=True, chat=("--data.chat=always", "--data.max_prompt_tokens=24")),
    **sft_sources("train"),
    **sft_sources("eval"),
    "run.seed": Row("1", "metrics"),
    "data.eval_fraction": Row("0.5", "metrics", ("--data.eval=[]", "--eval.every_n_steps=0")),
    "data.shuffle": Row("false", "metrics"),
    "data.chat": Row("always", "metrics", ("--data.max_prompt_tokens=24",)),
    "data.system_prompt": Row("1", "metrics", CHAT),
    "data.prompt_template": Row("1{prompt}", "metrics"),
    "data.max_prompt_tokens": Row("3", "log:too long"),
    "data.overlong_prompts": Row("error", "log:raise the limit", ("--data.max_prompt_tokens=3",)),
    "data.max_tokens": Row("6", "metrics"),
    "data.examples_per_step": Row("3", "metrics"),
    "data.train_on_prompt": Row("true", "metrics"),
    **{
        key: replace(row, command=row.command and "check sft")
        for key, row in trainer_rows("metrics", rl=False).items()
    },
    **course_rows(),
    "log.samples_per_step": not_used("log.samples_per_step", "1"),
    "checkpoint.keep_best": Row(
        "false",
        "files",
        (
            "--checkpoint.every_n_steps=1",
            "--checkpoint.keep_last=1",
            "--eval.every_n_steps=1",
            "--run.steps=3",
            "--trainer.optimizer.lr=30",  # so that the loss rises
        ),
    ),
}


def dpo_sources(section: str) -> dict[str, Row]:
    key, other = f"data.{section}.0", "[{path: pairs/test.jsonl}]"
    columns = (f"--data.{section}=[{{path: preferred.jsonl}}]",)
    labelled = (
        *KTO,
        "--data.train=[{path: labelled.jsonl}]",
        "--data.eval=[{path: labelled.jsonl}]",
    )
    if section == "eval":
        other = "[{path: pairs/train.jsonl}]"
    rows = {
        f"data.{section}": Row(other, "metrics"),
        f"{key}.path": Row("preferred.jsonl", "metrics"),
        f"{key}.split": Row("test", "metrics", (f"--data.{section}=[{{path: pairs}}]",)),
        f"{key}.subset": Row(
            "main", "datasets.load_dataset", (f"--data.{section}=[{{path: owner/name}}]",)
        ),
        f"{key}.max_rows": Row("2", "metrics"),
        f"{key}.columns.prompt": Row("q", "metrics", columns),
        f"{key}.columns.answer": Row("c", "metrics", labelled),
        f"{key}.columns.chosen": Row("c", "metrics", columns),
        f"{key}.columns.rejected": Row("c", "metrics", columns),
        f"{key}.columns.label": Row("good", "metrics", labelled),
        f"{key}.columns.margin": not_used(f"{key}.columns.margin", "c"),
        f"{key}.columns.task": not_used(f"{key}.columns.task", "kind"),
        f"{key}.answer_pattern": not_used(f"{key}.answer_pattern", "^."),
        f"{key}.task": not_used(f"{key}.task", "sums"),
    }
    if section == "train":
        both = ("--data.train=[{path: pairs/train.jsonl}, {path: preferred.jsonl}]",)
        rows[f"{key}.weight"] = Row("5", "metrics", both)
    return rows


KTO = ("--algorithm.loss=kto",)
KEEP_BEST = SFT["checkpoint.keep_best"]
DPO: dict[str, Row] = {
    **{
        key: replace(row, command=row.command and "check dpo")
        for key, row in SFT.items()
        if not key.startswith(("data.train", "data.eval.")) and key != "data.eval"
    },
    **dpo_sources("train"),
    **dpo_sources("eval"),
    **{
        f"trainer.{key}": replace(SFT[f"trainer.{key}"], value=value)
        for key, value in (
            ("max_tokens_per_microbatch", "48"),
            ("max_tokens_per_forward", "50"),
            ("micro_batch_size", "2"),
        )
    },
    **{
        f"trainer.parallel.reference_{name}_size": Row("3", "findings", EIGHT, command="check dpo")
        for name in ("ring", "ulysses")
    },
    "checkpoint.keep_best": replace(KEEP_BEST, given=(*KEEP_BEST.given, "--algorithm.loss=ipo")),
    "algorithm.loss": Row("{hinge: 1, sft: 0.1}", "metrics"),
    "algorithm.beta": Row("0.7", "metrics"),
    "algorithm.reference_cache": Row("kept", "log:scored by the reference, and kept in kept/"),
    "algorithm.label_smoothing": Row("0.2", "metrics"),
    "algorithm.simpo_gamma": Row("0.9", "metrics", ("--algorithm.loss=simpo",)),
    "algorithm.desirable_weight": Row("2", "metrics", KTO),
    "algorithm.undesirable_weight": Row("2", "metrics", KTO),
}


def scorer_sources(section: str) -> dict[str, Row]:
    key = f"data.{section}.0.columns"
    columns = (f"--data.{section}=[{{path: preferred.jsonl}}]",)
    return dpo_sources(section) | {
        f"{key}.margin": Row("m", "metrics", columns),
        f"{key}.answer": not_used(f"{key}.answer", "c"),
        f"{key}.label": not_used(f"{key}.label", "c"),
    }


REWARD_MODEL: dict[str, Row] = {
    **{
        key: replace(row, command=row.command and "check reward-model")
        for key, row in {**DPO, **{key: SFT[key] for key in SFT if "reference_" in key}}.items()
        if not key.startswith("algorithm.")
    },
    **scorer_sources("train"),
    **scorer_sources("eval"),
    "trainer.max_tokens_per_microbatch": replace(
        SFT["trainer.max_tokens_per_microbatch"], value="50"
    ),
    "trainer.logits_chunk_tokens": not_used("trainer.logits_chunk_tokens", "64"),
    "checkpoint.keep_best": KEEP_BEST,
    "algorithm.center_coef": Row("0.5", "metrics"),
}


def inference_sources(section: str, key: str, shown: str, told: tuple[str, ...]) -> dict[str, Row]:
    columns = (f"--data.{section}=[{{path: columns.jsonl, max_rows: 4}}]",)
    return {
        f"{key}.columns.prompt": Row("q", shown, columns),
        f"{key}.columns.answer": Row("a", shown, columns),
        f"{key}.columns.task": Row("kind", shown, columns),
        f"{key}.answer_pattern": Row("^.", shown, told),
        f"{key}.task": Row("sums", shown),
        f"{key}.path": Row("split/train.jsonl", shown, told),
        f"{key}.split": Row("test", shown, (f"--data.{section}=[{{path: split}}]",)),
        f"{key}.subset": Row(
            "main", "datasets.load_dataset", (f"--data.{section}=[{{path: owner/name}}]",)
        ),
        f"{key}.max_rows": Row("3", shown, told),
        f"data.{section}": Row("[{path: columns.jsonl, max_rows: 3}]", shown),
    }


def rendering_rows(shown: str) -> dict[str, Row]:
    return {
        "data.chat": Row("always", shown, ("--data.max_prompt_tokens=24",)),
        "data.system_prompt": Row("1", shown, CHAT),
        "data.prompt_template": Row("1{prompt}", shown),
        "data.max_prompt_tokens": Row("3", "log:too long"),
        "data.overlong_prompts": Row(
            "error", "log:raise the limit", ("--data.max_prompt_tokens=3",)
        ),
        "data.shuffle": not_used("data.shuffle", "false"),
    }


def engine_rows(shown: str, *, generates: bool) -> dict[str, Row]:
    """Where nothing trains: the engine that was built, which the rows of `rl` show at work."""
    built = {
        "gpu_memory_utilization": "0.3",
        "kv_cache_gib": "0.001",
        "kv_cache_dtype": "fp8",
        "max_num_seqs": "4",
        "max_num_batched_tokens": "8",
        "enable_prefix_caching": "false",
        "enforce_eager": "true",
    }
    size = "log:tensor_parallel_size|world size|processes"
    return {
        **{f"engine.{name}": Row(value, "EmbeddedEngine") for name, value in built.items()},
        "engine.backend": Row("vllm", "log:vllm"),
        "engine.tensor_parallel_size": Row("2", size),
        "engine.enable_sleep": Row("true", "log:engine.enable_sleep"),
    }


RUNS = ("--run.", "--rollout.", "--eval.every_n_steps")
REWARDS = {key: row for key, row in RL.items() if key.startswith(("env.", "reward."))}

EVALUATE: dict[str, Row] = {
    **run_rows(trains=False),
    **model_rows("samples", lora=False),
    **inference_sources("eval", "data.eval.0", "samples", ()),
    **rendering_rows("samples"),
    **engine_rows("samples", generates=False),
    **{
        key: replace(
            row,
            shows="samples" if row.shows == "metrics" else row.shows,
            given=tuple(x for x in row.given if not x.startswith(RUNS)),
        )
        for key, row in REWARDS.items()
    },
    **eval_rows("scores"),
    "eval.stop": Row("['1', 5, 6]", "scores"),
}
SCORED = ("--reward.functions=[{fn: 'rewards.py:even'}]", "--reward.num_workers=1")
HELD_OUT = ("--data.eval=[]", "--data.train=[{path: eval.jsonl}]", "--data.eval_fraction=0.5")
EVALUATE |= {
    key.replace("data.eval", "data.train"): Row(
        row.value.replace("max_rows: 3", "max_rows: 9"),
        row.shows.replace("data.eval", "data.train"),
        tuple(
            flag.replace("data.eval", "data.train").replace("max_rows: 4", "max_rows: 9")
            for flag in row.given
        ),
    )
    for key, row in inference_sources("eval", "data.eval.0", "samples", ()).items()
}
EVALUATE["data.train.0.weight"] = not_used("data.train.0.weight", "5")
EVALUATE = {
    key: Row(row.value, row.shows, (*HELD_OUT, *row.given)) if key.startswith("data.train") else row
    for key, row in EVALUATE.items()
}
EVALUATE["reward.functions.0.whole_groups"] = replace(
    WHOLE_GROUPS, shows="samples", given=(*WHOLE_GROUPS.given, "--eval.n_samples_per_prompt=2")
)
EVALUATE["data.eval_fraction"] = Row("0.8", "samples", HELD_OUT)

UNUSED_EVAL = "log:data.eval is .*and has no effect"
GENERATE: dict[str, Row] = {
    **run_rows(trains=False, has_dir=False),
    **model_rows("samples", lora=False),
    **inference_sources("train", "data.train.0", "samples", ()),
    "data.train.0.weight": not_used("data.train.0.weight", "5"),
    **rendering_rows("samples"),
    **engine_rows("samples", generates=True),
    **sampling_rows("generation", "samples"),
    "generation.stop": Row("['1', 5, 6]", "samples"),
    "data.eval": Row("[{path: eval.jsonl}]", UNUSED_EVAL),
    **{
        f"data.eval.0.{name}": Row(
            value,
            UNUSED_EVAL,
            flag="--data.eval=[{path: eval.jsonl, split: test, subset: main, "
            "max_rows: 2, columns: {prompt: q, answer: a, task: kind}, "
            "answer_pattern: x, task: x}]",
        )
        for name, value in (
            ("path", "eval.jsonl"),
            ("split", "test"),
            ("subset", "main"),
            ("max_rows", "2"),
            ("columns.prompt", "q"),
            ("columns.answer", "a"),
            ("columns.task", "kind"),
            ("answer_pattern", "x"),
            ("task", "x"),
        )
    },
    "data.eval_fraction": Row("0.5", "samples"),
    "n_samples_per_prompt": Row("2", "samples"),
    **{
        key: replace(
            row,
            shows="samples" if row.shows == "metrics" else row.shows,
            given=(
                *SCORED[1:],
                *(flag for flag in row.given or SCORED[:1] if not flag.startswith(RUNS)),
            ),
        )
        for key, row in REWARDS.items()
        if key.startswith("reward.")
    },
    "keep": Row("best", "samples", (*SCORED, "--n_samples_per_prompt=2")),
    "pass_threshold": Row("0", "samples", (*SCORED, "--keep=passing")),
    "output": Row("elsewhere.jsonl", "files"),
}

GENERATE["reward.functions.0.whole_groups"] = replace(
    WHOLE_GROUPS, shows="samples", given=(*WHOLE_GROUPS.given, "--n_samples_per_prompt=2")
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

EIGHT_B = ("--model.shape=qwen3-8b",)
LARGE = (  # where memory decides which splits there are, and with which further settings
    *EIGHT_B,
    "--rollout.prompts_per_step=64",
    "--rollout.n_samples_per_prompt=8",
    "--rollout.max_completion_tokens=1024",
)
SIMULATE: dict[str, Row] = {
    "run.seed": Row("1", "numbers"),
    "model.path": Row("Qwen/Qwen3-1.7B", "numbers", ("--model.path=Qwen/Qwen3-0.6B",)),
    "model.shape": Row("qwen3-1.7b", "numbers"),
    "model.dtype": Row("float32", "numbers"),
    "model.lora.rank": Row("8", "numbers"),
    "model.lora.target_modules": Row("[q_proj]", "numbers", LORA),
    "rollout.max_completion_tokens": Row("128", "numbers"),
    "rollout.prompts_per_step": Row("4", "numbers"),
    "rollout.n_samples_per_prompt": Row("4", "numbers"),
    "rollout.oversample_prompts": Row("4", "numbers"),
    "rollout.max_aborted_count": Row("0", "numbers"),
    "engine.gpu_memory_utilization": Row("0.01", "numbers"),
    "engine.kv_cache_gib": Row("0.1", "numbers"),
    "engine.kv_cache_dtype": Row("fp8", "numbers"),
    "engine.tensor_parallel_size": Row("2", "numbers"),
    "engine.max_num_seqs": Row("4", "numbers"),
    "engine.enable_prefix_caching": Row("false", "numbers"),
    "engine.enable_sleep": Row("true", "numbers"),
    "algorithm.kl.coef": Row("0.1", "numbers"),
    "algorithm.correction.kind": Row("tis", "numbers"),
    "trainer.num_epochs": Row("2", "numbers"),
    "trainer.prompts_per_minibatch": Row("2", "numbers"),
    "trainer.enable_sleep": Row("true", "numbers"),
    "trainer.parallel.fsdp_size": Row("2", "numbers"),
    "trainer.parallel.tensor_parallel_size": Row("2", "numbers"),
    "trainer.parallel.ulysses_size": Row("2", "numbers"),
    "trainer.parallel.ring_size": Row("2", "numbers"),
    "trainer.parallel.zero_stage": Row("0", "numbers", (*LARGE, "--plan.gpus=4")),
    **{
        f"trainer.{name}": Row(value, "numbers", LARGE)
        for name, value in (
            ("max_tokens_per_microbatch", "2048"),
            ("micro_batch_size", "1"),
            ("offload", "optimizer"),
            ("optimizer.name", "muon"),
            ("optimizer.state_dtype", "bfloat16"),
        )
    },
    "trainer.recompute": Row("full", "numbers", LARGE),
    "pipeline.max_staleness": Row("2", "numbers"),
    "pipeline.in_flight": Row("abort", "numbers"),
    **{
        f"cluster.{name}": Row(value, "numbers")
        for name, value in (
            ("address", "localhost:9"),
            ("num_trainers", "2"),
            ("update_weight_buffer_size", "1024"),
            ("engine_timeout_s", "7"),
        )
    },
    "cluster.num_engines": Row("1", "numbers"),
    "cluster.num_references": Row("1", "numbers", (*KL, "--plan.gpus=3")),
    "cluster.num_nodes": Row("2", "log:cluster.num_nodes.* no effect"),
    "cluster.devices_per_node": Row("1", "log:cluster.devices_per_node.* no effect"),
    "plan.gpus": Row("3", "numbers"),
    "plan.gpu": Row("H100", "numbers"),
    "plan.prompt_tokens": Row("64", "numbers"),
    "plan.lengths.distribution": Row("uniform", "numbers"),
    "plan.lengths.median": Row("100", "numbers"),
    "plan.lengths.sigma": Row("0.1", "numbers", ("--plan.lengths.median=100",)),
    "plan.lengths.path": Row(
        "lengths.jsonl",
        "exit",
        ("--plan.lengths.distribution=file",),
    ),
    "plan.goal": Row("memory", "numbers"),
    "plan.staleness": Row("[2]", "numbers"),
    "plan.steps": Row("5", "numbers"),
    "plan.decode_share": Row("0.5", "numbers"),
    "plan.decode_overhead_s": Row("0.01", "numbers"),
    "plan.prefill_share": Row("0.1", "numbers"),
    "plan.training_share": Row("0.1", "numbers"),
    "plan.training_scaling": Row("0.5", "numbers"),
    "plan.tensor_parallel_scaling": Row(
        "0.6", "numbers", ("--engine.tensor_parallel_size=2", "--plan.gpus=4")
    ),
    "plan.sync_bytes_per_s": Row("1e9", "numbers"),
    "plan.switch_s": Row("1", "numbers"),
    "plan.overhead_s": Row("1", "numbers"),
    "output": Row("other.json", "files"),
}
NOT_OF_TIME = (
    *(f"run.{name}" for name in ("device", "dir", "steps", "resume")),
    *(
        f"model.{name}"
        for name in ("tokenizer", "chat_template", "init", "exact", "trust_remote_code")
    ),
    "model.lora.alpha",
    "model.lora.load_in_4bit",  # these two change memory alone, and no split that fits or not
    *(
        f"{section}."
        for section in ("data", "env", "reward", "eval", "checkpoint", "log", "profile")
    ),
    *(f"rollout.{name}" for name in ("temperature", "stop")),
    "rollout.dynamic_sampling",
    "rollout.reward_range",
    "rollout.mask_off_policy_tokens",
    "rollout.truncated_samples",
    *(f"engine.{name}" for name in ("backend", "enforce_eager", "max_num_batched_tokens")),
    *(f"algorithm.{name}" for name in ("advantage", "loss", "aggregation", "clip_", "dual_clip")),
    *(f"algorithm.{name}" for name in ("entropy_coef", "kl.placement", "kl.estimator")),
    *("algorithm.gamma", "algorithm.lam", "critic.", "teacher."),
    *(f"algorithm.correction.{name}" for name in ("low", "high")),
    *(f"trainer.{name}" for name in ("max_tokens_per_forward", "recompute_every_n_layers")),
    *(f"trainer.{name}" for name in ("offload_activations", "compile", "matmul_precision")),
    *(f"trainer.{name}" for name in ("logits_chunk_tokens", "parity")),
    *(f"trainer.optimizer.{name}" for name in ("lr", "betas", "eps", "weight_decay", "muon_")),
    *(f"trainer.optimizer.{name}" for name in ("max_grad_norm", "schedule", "warmup", "min_lr")),
    *(f"trainer.parallel.{name}" for name in ("reference_", "timeout_s")),
)
"""Beginnings of keys of a recipe of `hone rl` that `hone plan` reads past, as its help says;
the rows of `rl` show what they change."""

ROWS: dict[str, dict[str, Row]] = {
    "rl": RL,
    "sft": SFT,
    "dpo": DPO,
    "reward-model": REWARD_MODEL,
    "eval": EVALUATE,
    "generate": GENERATE,
    "bench engine": BENCH_ENGINE,
    "bench train": BENCH_TRAIN,
    "plan": SIMULATE,
}
