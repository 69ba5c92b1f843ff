"""Rows that trees have in common, and what they need."""

from __future__ import annotations

from collections.abc import Mapping

from tests.config.row import Row

FIRST_HELD_OUT = ("--data.eval=[]", "--data.eval_fraction=0.5", "--data.shuffle_window=2")
CHAT = ("--data.chat=always", "--data.max_prompt_tokens=24")
HUB = ("--data.train=[{path: owner/name}]",)
EVAL_HUB = ("--data.eval=[{path: owner/name, max_rows: 4}]",)
SPLIT = ("--data.train=[{path: split}]",)
EVAL_SPLIT = ("--data.eval=[{path: split}]",)
NO_LEVEL = Row("nowhere", "log:nothing in column 'nowhere', which was to give the difficulty")
NO_PICTURES = Row("pictures", "log:no column for the images")
WHOLE_GROUPS = Row("true", "metrics", ("--reward.functions=[{fn: 'rewards.py:of_lists'}]",))
LORA = ("--model.lora.rank=2",)
KL = ("--algorithm.kl.coef=0.1",)
MINI = ("--trainer.prompts_per_minibatch=2", "--trainer.num_epochs=2")
MUON = ("--trainer.optimizer.name=muon",)
EIGHT = ("--run.device=cuda", "--model.path=Qwen/Qwen3-8B", "--nproc=8")
TRACED = ("--profile.train.steps=[0]",)
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
        "model.image_cache_gib": not_used("model.image_cache_gib", "2"),
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


def image_rows() -> dict[str, Row]:
    """Keys of images, which a model of text does not use. `tests/loops/test_images.py` shows what
    they do with one that sees images."""
    values = {
        "max_image_tokens": "64",
        "image_errors": "drop",
        "image_urls": "true",
        "image_workers": "0",
    }
    return {f"data.{name}": not_used(f"data.{name}", value) for name, value in values.items()}


def filter_rows(shown: str, section: str = "train") -> dict[str, Row]:
    """Keys by which rows are left out before they are rendered. The last row of `holes.jsonl` has
    no answer, and those before it come twice."""

    def of(most: int) -> tuple[str, ...]:
        return (f"--data.{section}=[{{path: holes.jsonl, max_rows: {most}}}]",)

    return {
        "data.filter": Row("filters.py:some", shown, of(8)),
        "data.missing_answers": Row("drop", "log:dropped with no answer", of(9)),
        "data.duplicates": Row("drop", "log:dropped with the content of an earlier row", of(8)),
    }


def served_image_rows() -> dict[str, Row]:
    """Those of `image_rows` that `hone serve` has."""
    names = ("data.max_image_tokens", "data.image_workers")
    return {name: row for name, row in image_rows().items() if name in names}


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
        f"{key}.0.columns.images": NO_PICTURES,
        f"{key}.0.columns.difficulty": NO_LEVEL
        if train
        else not_used(f"{key}.0.columns.difficulty", "level"),
        f"{key}.0.columns.pass_rate": not_used(f"{key}.0.columns.pass_rate", "rate"),
    } | {f"{key}.0.{name}": row for name, row in columns.items()}


def mix_rows(shown: str, first: str, second: str) -> dict[str, Row]:
    """Keys of the first of two sources, by which their rows are mixed; each is the fields of a
    source in YAML."""
    both = (f"--data.train=[{{{first}}}, {{{second}}}]",)
    few = (f"--data.train=[{{{first}, max_rows: 1}}, {{{second}}}]",)
    values = {"weight": ("5", both), "max_epochs": ("1", few), "from_step": ("2", both),
              "until_step": ("1", both)}  # fmt: skip
    return {
        f"data.train.0.{name}": Row(value, shown, given) for name, (value, given) in values.items()
    }


def unmixed_rows() -> dict[str, Row]:
    """The same keys where nothing is trained on."""
    keys = [f"data.train.0.{name}" for name in ("weight", "max_epochs", "from_step", "until_step")]
    return {key: not_used(key, "5") for key in keys}


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
        "trainer.parallel.expert_parallel_size": Row("2", "findings", EIGHT, command="check rl"),
        "trainer.parallel.pipeline_parallel_size": Row("2", "derived", EIGHT, command="check rl"),
        "trainer.parallel.virtual_stages": Row(
            "2",
            "derived",
            (*EIGHT, long, "--trainer.parallel.pipeline_parallel_size=2"),
            command="check rl",
        ),
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


def not_used(key: str, value: str) -> Row:
    return Row(value, f"log:{key} is .*and has no effect")


def engine_rows(shown: str, *, generates: bool) -> dict[str, Row]:
    """Where nothing trains: the engine that was built, which the rows of `rl` show at work."""
    built = {
        "gpu_memory_utilization": "0.3",
        "kv_cache_gib": "0.001",
        "kv_cache_dtype": "fp8",
        "weight_dtype": "int8",
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
