"""`hone import`: scripts of other frameworks become recipes, and no setting is lost on the way."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest
import yaml

from hone.cli.main import main
from hone.config.aliases import FRAMEWORKS, alias_hint, aliases, find_alias
from hone.config.recipe import read_recipe, to_yaml
from hone.config.tree import RLConfig
from hone.errors import UserError
from hone.tools.imports import transforms
from hone.tools.imports.convert import convert
from hone.tools.imports.frameworks import PROGRAMS, read_command, read_file
from hone.tools.imports.imported import FILL_IN, Imported
from hone.tools.imports.source import Given, Source, Unread
from hone.tools.imports.write import recipe
from tests.config import workspace as files
from tests.tables import table

HERE = Path(__file__).parent
SCRIPTS = sorted(
    path.name
    for path in (HERE / "golden").iterdir()
    if path.is_file() and ".recipe" not in path.name  # no `__pycache__`
)
FLAGS = {
    framework: str(names).split()
    for framework, names in read_recipe(HERE / "guide_flags.yaml").values.items()
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The scripts, and what they name, so that recipes can be checked."""
    files.fill(tmp_path)
    for name in SCRIPTS:
        shutil.copy(HERE / "golden" / name, tmp_path)
    shutil.copytree(HERE / "beside", tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "data")
    for name in ("MODEL", "NPROC", "NUM_ROLLOUT", "NO_WAIT", "MODEL_CONFIG_DIR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def imported(name: str) -> Imported:
    return convert(read_file(name.partition("_")[0], Path(name), {"HOME": "data"}))


def outcomes(found: Imported) -> set[str]:
    """Settings that a recipe says something of."""
    told = [one for value in found.values.values() for one in value.given]
    told += [one for entries in (found.missing, found.unread, found.unneeded) for one, _ in entries]
    return {one.name for one in told}


def filled_in(found: Imported) -> list[str]:
    """Numbers for the keys that are left open."""
    keys = ("run.steps", "trainer.optimizer.warmup_steps")
    return [f"--{key}=1" for key in keys if found.key(key) == FILL_IN]


@table("name", SCRIPTS)
def test_a_recipe_is_that_of_its_golden_file(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a change of the table: `hone import FRAMEWORK SCRIPT`, read, and written there."""
    assert main(["import", name.partition("_")[0], name]) == 0
    expected = (HERE / "golden" / f"{name.rpartition('.')[0]}.recipe.yaml").read_text()
    assert capsys.readouterr().out == expected


@table("name", SCRIPTS)
def test_every_setting_is_accounted_for(name: str, folder: Path) -> None:
    found = imported(name)
    assert {one.name for one in found.source.given} <= outcomes(found)


@table("name", SCRIPTS)
def test_a_recipe_passes_its_check(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With paths of files that are here, it has no error but those of packages that are not."""
    found = imported(name)
    mine = f"{name.rpartition('.')[0]}-mine.yaml"
    main(["import", name.partition("_")[0], name, "--output", mine])
    command = found.source.command
    data = "pairs.jsonl" if command == "dpo" else "train.jsonl"
    local = ["--model.path=model", f"--data.train=[{{path: {data}}}]", "--data.eval=[]"]
    local += ["--eval.every_n_steps=0", "--eval.at_start=false", "--log.to=[]"]
    local += filled_in(found)
    if command == "rl":
        local += ["--reward.functions=[{fn: exact_match}]"]
    nproc = [] if found.is_spread else ["--nproc", str(found.processes)]
    code = main(["check", command, mine, *local, *nproc, "--gpu", "h200"])
    printed = capsys.readouterr().out
    assert code == 0, printed


@table("framework, name", [(key, name) for key in FLAGS for name in FLAGS[key]])
def test_every_flag_of_the_guides_is_known(framework: str, name: str) -> None:
    """By a row of the framework; a hint says what the row does, never a key that is spelt alike."""
    path = name.split(".")
    found = find_alias(framework, path)
    assert found is not None
    _, row = found
    program = {"openrlhf": "train_ppo_ray", "verl": "main_ppo", "relax": "train"}[framework]
    for value in (True, False, 2, "text"):
        given = Given(name.lower().replace("-", "_"), value, "line 1")
        source = Source(framework=framework, program=program, command="rl", given=[given])
        assert given.name in outcomes(convert(source)), value
    hint = alias_hint(RLConfig, path)
    if hint is not None and row.to:
        assert any(key in hint for key in row.to), hint
    elif hint is not None:
        assert hint.startswith(("not served yet", "nothing to set")) or "did you mean" in hint


ODD = (True, False, None, 0, -1, 3, 0.5, "text", "", [1, 2], ["a"], Unread("$X"))


@table("value", ODD)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_no_value_of_any_setting_is_too_odd(framework: str, value: object) -> None:
    """All settings of the table at once, for each program: each is accounted for."""
    names = [name for row in aliases() for name in row.names.get(framework, ()) if "*" not in name]
    given = [Given(name, value, "line 1") for name in names]
    for program, command in PROGRAMS[framework].items():
        source = Source(framework=framework, program=program, command=command, given=given)
        found = convert(source)
        assert set(names) <= outcomes(found)
        assert yaml.load(recipe(found, "run.sh", "mine.yaml"), yaml.CSafeLoader)


LONG = [
    "solve it step by step " * 12,
    "first\n\n  second: # no comment\n" * 3,
    "a\u2028b\x85c\td\re",
    "'quoted' \"twice\": {x}, [y] # z " * 5,
    "x" * 300,
]


@table("text", LONG)
def test_a_long_text_is_read_back(text: str, tmp_path: Path) -> None:
    """In a value, in the comment at one, and in a comment of its own."""
    given = [Given("system_prompt", text, "line 1"), Given("apply_chat_template_kwargs", text, ""),
             Given("prompt_data", f"data.jsonl,{text[:9].strip()}", "line 2")]  # fmt: skip
    source = Source(framework="relax", program="train", command="rl", given=given)
    file = tmp_path / "mine.yaml"
    file.write_text(recipe(convert(source), "run.sh", "mine.yaml"), encoding="utf-8")
    assert read_recipe(file).values["data"]["system_prompt"] == text


def test_the_table_names_what_exists() -> None:
    by_name: dict[tuple[str, str], object] = {}
    for row in aliases():
        for framework, names in row.names.items():
            for name in names:
                assert by_name.setdefault((framework, name), row) is row, name
        assert (row.map is None) or not row.by
    own = {name.removesuffix("_") for name in vars(transforms) if not name.startswith("_")}
    own &= {name for name in own if hasattr(transforms, f"{name}_")}
    named = {row.by for row in aliases() if row.by}
    assert named == {*transforms._OF_VALUE, *transforms._OF_RUN, *own}


COMMANDS = [
    # A command, and what the recipe has, or what is said of a setting.
    ("openrlhf", "train_ppo_ray.py --train_batch_size 64 --rollout_batch_size 16 "
     "--n_samples_per_prompt 8", {"trainer.prompts_per_minibatch": 8}),
    ("openrlhf", "train_ppo_ray.py --train_batch_size 100 --rollout_batch_size 16 "
     "--n_samples_per_prompt 8", {"trainer.prompts_per_minibatch": None}),
    ("openrlhf", "train_ppo_ray.py --init_kl_coef 0.1 --use_kl_loss --kl_estimator k1",
     {"algorithm.kl.coef": 0.1, "algorithm.kl.placement": "loss", "algorithm.kl.estimator": "k3"}),
    ("openrlhf", "train_ppo_ray.py --algo.kl.init_coef 0.1",
     {"algorithm.kl.placement": "reward", "algorithm.kl.estimator": "k1"}),
    ("openrlhf", "train_ppo_ray.py --vllm.num_engines 2 --actor.num_gpus_per_node 4 "
     "--train.async_enable --train.async_queue_size 2",
     {"cluster.num_engines": 2, "cluster.num_trainers": 4, "pipeline.max_staleness": 2}),
    ("openrlhf", "train_ppo_ray.py --algo.advantage.is_correction_level token "
     "--algo.advantage.is_correction_threshold 0.5 3",
     {"algorithm.correction.kind": "icepop", "algorithm.correction.low": 0.5,
      "algorithm.correction.high": 3.0}),
    ("openrlhf", "train_ppo_ray.py --remote_rm_url http://scores:5000/get_reward "
     "--reward.clip_range -5 5",
     {"reward.functions.0.fn": "http://scores:5000/get_reward", "reward.clip": [-5.0, 5.0]}),
    ("openrlhf", "train_ppo_ray.py --remote_rm_url http://a/x,http://b/x",
     {"reward.functions.0.fn": FILL_IN}),
    ("openrlhf", "train_sft.py --train.batch_size 64 --data.max_len 512 --data.max_samples 640",
     {"data.examples_per_step": 64, "data.max_tokens": 512, "run.steps": 20}),
    ("openrlhf", "train_rm.py --train.batch_size 64 --train.micro_batch_size 2",
     {"data.examples_per_step": 64, "trainer.micro_batch_size": 4}),
    ("trl", "trl reward --center_rewards_coefficient 0.01", {"algorithm.center_coef": 0.01}),
    ("verl", "verl.trainer.main_ppo data.train_batch_size=128 "
     "actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.rollout.n=8",
     {"rollout.prompts_per_step": 128, "trainer.prompts_per_minibatch": 32}),
    # Evaluation samples as training does where nothing is set for it.
    ("trl", "trl grpo --eval_dataset e --temperature 0.9 --max_completion_length 786 --top_p 0.95 "
     "--top_k 50 --min_p 0.1",
     {"eval.n_samples_per_prompt": 8, "eval.temperature": 0.9, "eval.max_completion_tokens": 786,
      "eval.top_p": 0.95, "eval.top_k": 50, "eval.min_p": 0.1}),
    ("trl", "trl grpo --eval_dataset e --num_generations 4 --num_generations_eval 2 --top_k -1",
     {"eval.n_samples_per_prompt": 2, "eval.max_completion_tokens": 512, "eval.top_k": 0}),
    ("trl", "trl rloo --eval_dataset e", {"eval.n_samples_per_prompt": 2}),
    ("trl", "trl grpo --temperature 0.9 --top_p 0.95",
     {"eval.n_samples_per_prompt": 1, "eval.temperature": 1.0, "eval.top_p": 1.0}),
    ("verl", "verl.trainer.main_ppo data.val_files=e data.max_response_length=256 "
     "actor_rollout_ref.rollout.temperature=0.7",
     {"eval.max_completion_tokens": 256, "eval.temperature": 0.0, "eval.n_samples_per_prompt": 1}),
    ("verl", "verl.trainer.main_ppo data.max_response_length=256",
     {"eval.max_completion_tokens": 1024}),
    ("openrlhf", "train_ppo_ray.py --eval_dataset e --generate_max_len 300 --temperature 0.9",
     {"eval.max_completion_tokens": 300, "eval.temperature": 0.6}),
    ("relax", "relax/entrypoints/train.py --eval-prompt-data a b --rollout-max-response-len 300 "
     "--rollout-temperature 0.8", {"eval.max_completion_tokens": 300, "eval.temperature": 0.8}),
    ("relax", "relax/entrypoints/train.py --eval-prompt-data a b --rollout-max-response-len 300 "
     "--eval-max-response-len 600 --eval-temperature 0.5",
     {"eval.max_completion_tokens": 600, "eval.temperature": 0.5}),
    # Checkpoints are deleted here where nothing is set, and not there.
    *((framework, command, {"checkpoint.keep_last": kept}) for framework, command, kept in (
        ("verl", "verl.trainer.main_ppo trainer.save_freq=20", 1_000_000),
        ("verl", "verl.trainer.main_ppo trainer.save_freq=20 trainer.max_actor_ckpt_to_keep=null",
         1_000_000),
        ("verl", "verl.trainer.main_ppo trainer.save_freq=20 trainer.max_actor_ckpt_to_keep=3", 3),
        ("verl", "verl.trainer.main_ppo", 2),
        ("verl", "verl.trainer.sft_trainer trainer.save_freq=20", 1_000_000),
        ("trl", "trl grpo --save_steps 20", 1_000_000),
        ("trl", "trl dpo", 1_000_000),
        ("trl", "trl sft --save_total_limit 1", 1),
        ("trl", "trl sft --save_strategy no", 2),
        ("openrlhf", "openrlhf.cli.train_dpo --save_steps 20", 3))),
    *(("verl", "verl.trainer.main_ppo data.train_batch_size=256 "
       "actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.ppo_epochs=2 "
       f"trainer.total_training_steps=100 actor_rollout_ref.actor.optim.{setting}",
       {"trainer.optimizer.warmup_steps": 40})
      for setting in ("lr_warmup_steps=5", "lr_warmup_steps_ratio=0.05")),
    ("verl", "verl.trainer.sft_trainer optim.lr_warmup_steps=5",
     {"trainer.optimizer.warmup_steps": 5}),
    ("verl", "verl.trainer.main_ppo algorithm.adv_estimator=grpo "
     "algorithm.norm_adv_by_std_in_grpo=False", {"algorithm.advantage": "dr_grpo"}),
    ("verl", "verl.trainer.main_ppo actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
     {"algorithm.loss": "gspo", "algorithm.dual_clip": None}),
    ("verl", "verl.trainer.main_ppo actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean",
     {"algorithm.loss": "gmpo", "algorithm.aggregation": "sequence_mean"}),
    ("verl", "verl.trainer.main_ppo algorithm.rollout_correction.rollout_is=token "
     "algorithm.rollout_correction.rollout_is_threshold=0.5_5.0",
     {"algorithm.correction.kind": "icepop", "algorithm.correction.low": 0.5}),
    ("verl", "verl.trainer.main_ppo actor_rollout_ref.actor.kl_loss_coef=0.5",
     {"algorithm.kl.coef": 0.0}),
    ("verl", "verl.trainer.main_ppo critic.optim.lr=2e-5 critic.cliprange_value=0.2",
     {"critic.lr": 2e-5, "critic.value_clip": 0.2, "trainer.optimizer.lr": 1e-6}),
    ("trl", "trl grpo --num_generations 4 --per_device_train_batch_size 8 "
     "--gradient_accumulation_steps 2 --steps_per_generation 4 --max_steps 100",
     {"rollout.prompts_per_step": 8, "trainer.prompts_per_minibatch": 4, "run.steps": 50}),
    ("trl", "accelerate launch --num_processes 4 trl/scripts/grpo.py "
     "--num_generations 8 --per_device_train_batch_size 8", {"rollout.prompts_per_step": 4}),
    ("trl", "trl grpo --loss_type cispo --epsilon_high 5",
     {"algorithm.loss": "cispo", "algorithm.clip_high": 4.0, "algorithm.clip_low": 1.0}),
    ("trl", "trl rloo --beta 0.05", {"algorithm.advantage": "rloo",
     "algorithm.kl.placement": "reward", "algorithm.kl.estimator": "k1"}),
    ("trl", "trl kto --beta 0.2", {"algorithm.loss": "kto", "algorithm.beta": 0.2}),
    ("relax", "relax/entrypoints/train.py --global-batch-size 64 --rollout-batch-size 16 "
     "--n-samples-per-prompt 8 --colocate", {"trainer.prompts_per_minibatch": 8}),
    *(("relax", "relax/entrypoints/train.py --recompute-granularity full "
       f"--recompute-method {method} --recompute-num-layers {number}", {"trainer.recompute": ours})
      for method, number, ours in (
          ("uniform", 1, "full"), ("uniform", 4, "uniform:4"), ("block", 12, "block:12"))),
    ("verl", "verl.trainer.main_ppo "
     "+actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full "
     "+actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method=block "
     "+actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers=3",
     {"trainer.recompute": "block:3"}),
    ("relax", "relax/entrypoints/train.py --rollout-batch-size 16 --over-sampling-batch-size 24 "
     "--partial-rollout --partial-rollout-max-aborted-count 3",
     {"rollout.oversample_prompts": 8, "rollout.max_aborted_count": 3}),
    # Where roles are.
    ("openrlhf", "train_ppo_ray.py --colocate_all_models --actor_num_gpus_per_node 8 "
     "--vllm_num_engines 4 --vllm_tensor_parallel_size 2 --deepspeed_enable_sleep",
     {"engine.tensor_parallel_size": 2, "trainer.enable_sleep": True, "cluster.num_engines": 0}),
    ("openrlhf", "train_ppo_ray.py --colocate_all_models --async_train --vllm_num_engines 2 "
     "--actor_num_gpus_per_node 4 --vllm_tensor_parallel_size 2 --async_queue_size 3",
     {"cluster.num_engines": 2, "cluster.num_trainers": 4, "pipeline.max_staleness": 3}),
    ("openrlhf", "train_ppo_ray.py --ref_num_gpus_per_node 4 --reward_num_gpus_per_node 4 "
     "--critic_num_gpus_per_node 4 --actor_num_gpus_per_node 4 --vllm_num_engines 2 "
     "--vllm_tensor_parallel_size 2 --reward_pretrain r",
     {"cluster.num_references": 4, "cluster.num_reward_models": 4, "cluster.num_critics": 4,
      "cluster.num_trainers": 4, "cluster.num_engines": 2, "engine.tensor_parallel_size": 2}),
    ("openrlhf", "train_ppo_ray.py --ref_num_nodes 2 --ref_num_gpus_per_node 4 "
     "--colocate_actor_ref --critic_num_nodes 2 --critic_num_gpus_per_node 4 "
     "--advantage_estimator rloo", {"cluster.num_references": 0, "cluster.num_critics": 0}),
    ("verl", "verl.trainer.main_ppo reward_model.enable=True reward_model.model.path=r "
     "reward_model.enable_resource_pool=True reward_model.n_gpus_per_node=2 reward_model.nnodes=2",
     {"cluster.num_reward_models": 4, "reward.model.path": "r", "reward.functions.0.fn": None}),
    ("verl", "verl.trainer.main_ppo reward_model.model.path=r",
     {"reward.model.path": None, "reward.functions.0.fn": "math"}),
    ("verl", "verl.trainer.main_ppo actor_rollout_ref.actor.fsdp_config.param_offload=True "
     "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True",
     {"trainer.enable_sleep": True, "trainer.offload": "none"}),
    ("verl", "verl.trainer.sft_trainer engine.optimizer_offload=True",
     {"trainer.offload": "optimizer"}),
    ("verl", "verl.trainer.main_ppo algorithm.adv_estimator=gae "
     "critic.fsdp_config.param_offload=True",
     {"trainer.enable_sleep": True, "critic.offload": None}),
    # Agents and tools.
    ("openrlhf", "train_ppo_ray.py --agent_func_path agents/maths.py --remote_rm_url r.py",
     {"env.path": "agents/maths.py:AgentExecutor", "reward.functions.0.fn": "r.py:reward_func"}),
    ("trl", "trl grpo --environment_factory games.wordle.Wordle --tools [web.tools.search] "
     "--max_tool_calling_iterations 4",
     {"env.path": "games.wordle:Wordle", "env.tools": ["web.tools:search"], "env.max_turns": 4}),
    # Images.
    ("relax", "relax/entrypoints/train.py --prompt-data d --mm-processor-pool-size 4 "
     "--multimodal-keys {\"image\":\"figure\"} --image-max-token-num 512",
     {"data.image_workers": 4, "data.train.0.columns.images": "figure",
      "data.max_image_tokens": 512}),
    ("verl", "verl.trainer.main_ppo data.train_files=a data.val_files=b data.image_key=figures "
     "+data.mm_processor_kwargs.max_pixels=602112 actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-3B",
     {"data.train.0.columns.images": "figures", "data.eval.0.columns.images": "figures",
      "data.max_image_tokens": 768}),
    ("verl", "verl.trainer.main_ppo data.train_files=a data.image_key=images "
     "+data.max_pixels=602112 actor_rollout_ref.model.path=Qwen/Qwen3-VL-4B-Instruct",
     {"data.train.0.columns.images": None, "data.max_image_tokens": 588}),
    ("openrlhf", "train_ppo_ray.py --data.prompt_dataset d --data.image_key pictures "
     "--data.max_images_per_prompt 4", {"data.train.0.columns.images": "pictures"}),
    # Evaluation reads the columns that training reads.
    ("openrlhf", "train_ppo_ray.py --prompt_data d --input_key question --label_key gold "
     "--eval_dataset e", {"data.eval.0.columns.prompt": "question",
     "data.eval.0.columns.answer": "gold"}),
    ("verl", "verl.trainer.main_ppo data.prompt_key=messages data.train_files=[a,b] "
     "data.val_files=[c,d]", {"data.train.1.columns.prompt": "messages",
     "data.eval.1.columns.prompt": "messages"}),
    ("relax", "relax/entrypoints/train.py --input-key a --prompt-data d --eval-prompt-data n e "
     "--eval-input-key b",
     {"data.train.0.columns.prompt": "a", "data.eval.0.columns.prompt": "b"}),
    ("trl", "trl sft --dataset_name d", {"data.shuffle": True}),
    ("trl", "trl sft --dataset_name d --shuffle_dataset False", {"data.shuffle": True}),
    ("trl", "trl grpo --reward_funcs org/reward-model accuracy_reward",
     {"reward.model.path": "org/reward-model", "reward.functions.0.fn": "math"}),
]  # fmt: skip


@table("framework, command, expected", COMMANDS)
def test_values_are_those_of_the_command(
    framework: str, command: str, expected: dict[str, object]
) -> None:
    words = (
        command.replace("train_", "openrlhf/cli/train_", 1) if framework == "openrlhf" else command
    )
    found = convert(read_command(framework, words.split()))
    assert {key: found.key(key) for key in expected} == expected, found


WARNED = [
    ("openrlhf", "openrlhf/cli/train_dpo.py --ipo", "means over its tokens"),
    ("openrlhf", "openrlhf/cli/train_ppo_ray.py --train_batch_size 100 --rollout_batch_size 16 "
     "--n_samples_per_prompt 8", "divides rollout.prompts_per_step 16 is 16"),
    ("openrlhf", "openrlhf/cli/train_ppo_ray.py --lambd 0.9", "a tool's"),
    ("openrlhf", "openrlhf/cli/train_ppo_ray.py --use_kl_loss", "expected gradient of 0"),
    ("verl", "verl.trainer.main_ppo actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum",
     "divided by rollout.max_completion_tokens"),
    ("verl", "verl.trainer.main_ppo actor_rollout_ref.actor.use_dynamic_bsz=True "
     "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=9000", "soft limits"),
    ("verl", "verl.trainer.main_ppo actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean",
     "bound the logarithm"),
    ("trl", "trl grpo --per_device_train_batch_size 4", "with N multiply by N"),
    ("trl", "trl grpo --loss_type cispo --epsilon_high 5", "1 + algorithm.clip_high"),
    ("trl", "trl grpo --max_steps 10", "optimizer steps there"),
    ("relax", "relax/entrypoints/train.py --sglang-mem-fraction-static 0.8", "of free memory"),
    ("openrlhf", "openrlhf/cli/train_ppo_ray.py --ref_num_gpus_per_node 4 "
     "--reward_num_gpus_per_node 4 --critic_num_gpus_per_node 4 --actor_num_gpus_per_node 4 "
     "--vllm_num_engines 2 --vllm_tensor_parallel_size 2 --reward_pretrain r",
     "20 devices are needed: 4 (trainers), 4 (2 engines of 2), 4 (of the critic), 4 (of the "
     "reference), 4 (of the reward model)"),
    ("openrlhf", "openrlhf/cli/train_ppo_ray.py --colocate_critic_reward --reward_pretrain r "
     "--reward_num_gpus_per_node 2", "shares the critic's devices there"),
    ("verl", "verl.trainer.main_ppo actor_rollout_ref.actor.freeze_vision_tower=False",
     "is trained there, and frozen here"),
    ("trl", "trl grpo --model_name_or_path Qwen/Qwen3-VL-2B-Instruct",
     "is trained there, and frozen here"),
    ("openrlhf", "openrlhf/cli/train_ppo_ray.py --actor.freeze_visual_encoder "
     "--data.image_key figures", "here data.max_image_tokens 768 does"),
]  # fmt: skip


@table("framework, command, words", WARNED)
def test_differences_of_meaning_are_told(framework: str, command: str, words: str) -> None:
    found = convert(read_command(framework, command.split()))
    assert any(words in text for text in found.differs), found.differs


IMAGES_NOT_SERVED = [
    ("verl", "verl.trainer.main_ppo +data.video_key=clips", "videos"),
    ("verl", "verl.trainer.main_ppo model.lora.freeze_language_model=True", "frozen decoder"),
    ("verl", "verl.trainer.main_ppo +data.mm_processor_kwargs.sampling_rate=16000", "sound"),
    ("verl", "verl.trainer.main_ppo +data.mm_processor_kwargs.min_pixels=50176", "made larger"),
    ("relax", 'relax/entrypoints/train.py --multimodal-keys {"video":"clip"}', "videos"),
    ("relax", "relax/entrypoints/train.py --image-min-token-num 64", "made larger"),
]


@table("framework, command, words", IMAGES_NOT_SERVED)
def test_what_is_not_served_of_images_is_said(framework: str, command: str, words: str) -> None:
    found = convert(read_command(framework, command.split()))
    assert [words in why for one, why in found.missing if one.where] == [True]
    assert not found.unread


FROZEN = [
    ("openrlhf", "openrlhf/cli/train_ppo_ray.py --actor.freeze_visual_encoder "
     "--data.image_key images --data.max_images_per_prompt 2"),
    ("verl", "verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B-Instruct "
     "actor_rollout_ref.actor.freeze_vision_tower=True data.image_key=images "
     "actor_rollout_ref.model.exclude_modules=.*visual.* +actor_rollout_ref.rollout.limit_images=4 "
     "+actor_rollout_ref.rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache=True"),
]  # fmt: skip


@table("framework, command", FROZEN)
def test_a_frozen_tower_is_as_here(framework: str, command: str) -> None:
    found = convert(read_command(framework, command.split()))
    assert not found.unread
    assert not [one for one, _ in found.missing if one.where]
    assert not any("tower" in text for text in found.differs)


READ_BY_OTHERS = [
    ("openrlhf", "openrlhf/cli/train_ppo_ray.py --async_train --vllm_num_engines 1 "
     "--async_queue_size 2"),
    ("relax", "relax/entrypoints/train.py --tool-key tools"),
    ("verl", "verl.trainer.main_ppo reward_model.enable=True reward_model.model.path=r"),
]  # fmt: skip


@table("framework, command", READ_BY_OTHERS)
def test_what_is_used_is_not_listed_as_unread(framework: str, command: str) -> None:
    found = convert(read_command(framework, command.split()))
    assert not found.unread
    assert not [one for one, _ in found.missing if one.where]


def test_every_setting_that_a_function_asks_for_is_known() -> None:
    """Else it is used, and listed as a name that nobody knows."""
    tree = ast.parse(Path(transforms.__file__).read_text(encoding="utf-8"))
    asked = {
        argument.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("run.given", "given")
        for argument in node.args
        if isinstance(argument, ast.Constant)
    }
    assert len(asked) > 30
    ends = [f".{name}" for row in aliases() for names in row.names.values() for name in names]
    for name in map(str, asked):
        assert any(end.endswith(f".{name}") for end in ends) or any(
            find_alias(framework, name.split(".")) for framework in FRAMEWORKS
        ), name


def test_no_reward_is_missed_where_a_model_scores() -> None:
    words = "openrlhf/cli/train_ppo_ray.py --reward_pretrain r --pretrain m --prompt_data d"
    to_do = convert(read_command("openrlhf", words.split())).to_do
    assert not any("reward" in text for text in to_do)


def test_nought_is_not_always_off() -> None:
    """OpenRLHF multiplies rewards of truncated samples with this."""
    command = ["openrlhf.cli.train_ppo_ray", "--stop_properly_penalty_coef", "0.0"]
    found = convert(read_command("openrlhf", command))
    assert "stop_properly_penalty_coef" in {one.name for one, _ in found.missing}


def test_values_that_only_a_run_could_tell_are_never_guessed(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "python3 -m verl.trainer.main_ppo trainer.nnodes=$NODES data.train_batch_size=$(wc -l f) "
        "actor_rollout_ref.model.path=$ROOT/model\n"
    )
    found = convert(read_file("verl", script, {}))
    assert {one.name for one, _ in found.unread} == {"data.train_batch_size"}
    assert found.key("model.path") == "$ROOT/model"
    assert any("$ROOT" in text for text in found.to_do)
    set_ = convert(read_file("verl", script, {"ROOT": "/models"}))
    assert set_.key("model.path") == "/models/model"


MISTAKES = [
    (["import", "vllm", "run.sh"], "There are openrlhf, verl, relax, trl"),
    (["import", "verl"], "takes one file, or a command behind `--`"),
    (["import", "verl", "a.sh", "b.sh"], "takes one file"),
    (["import", "verl", "missing.sh"], "error: there is no file 'missing.sh'. Name a shell"),
    (["import", "verl", "."], "'.' cannot be read: Is a directory."),
    (["import", "verl", "binary.sh"], "it is no text in UTF-8"),
    (["import", "verl", "--", "python3", "train.py"], "runs nothing of verl's that trains"),
    (["import", "openrlhf", "--", "openrlhf.cli.train_kto"], "--algorithm.loss kto"),
    (["import", "trl", "bare.yaml"], "does not say what it is for"),
    (["import", "trl", "none.py"], "makes no trainer of TRL"),
    (["import", "verl", "none.py"], "read for trl alone"),
    (["import", "trl", "bad.py"], "not valid Python"),
    (["import", "verl", "--output", "there.yaml", "--", "verl.trainer.main_ppo"], "exists"),
]


@table("argv, words", MISTAKES)
def test_mistakes_are_explained(
    argv: list[str], words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "bare.yaml").write_text(to_yaml({"seed": 1}))
    (folder / "there.yaml").write_text("")
    (folder / "none.py").write_text("print(1)")
    (folder / "bad.py").write_text("def (")
    (folder / "binary.sh").write_bytes(b"\xff\xfe")
    assert main(argv) == 2
    assert words in capsys.readouterr().err


def test_a_second_run_of_a_script_is_told(tmp_path: Path) -> None:
    script = tmp_path / "two.sh"
    script.write_text("python -m openrlhf.cli.train_sft --pretrain m\n"
                      "python -m openrlhf.cli.train_dpo --pretrain m\n")  # fmt: skip
    source = read_file("openrlhf", script, {})
    assert source.program == "train_sft"
    assert source.notes == ["line 2: a further run, of openrlhf.cli.train_dpo, is left out"]


def test_a_config_of_hydra(folder: Path) -> None:
    """What `--config-path` and `--config-name` name is read where it is here, else that is said."""
    (folder / "conf").mkdir()
    (folder / "conf" / "mine.yaml").write_text(to_yaml({"data": {"train_batch_size": 48}}))
    words = ["verl.trainer.main_ppo", "--config-path=conf", "--config-name", "mine"]
    assert convert(read_command("verl", words)).key("rollout.prompts_per_step") == 48
    (folder / "conf" / "mine.yaml").unlink()
    assert "not here" in read_command("verl", words).notes[0]


def test_help_teaches_with_an_example_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"hone import {name} " in out for name in FRAMEWORKS)


def test_a_config_file_and_flags(folder: Path) -> None:
    """What `--config` names is read, and flags win over it."""
    found = convert(
        read_command("trl", ["trl", "dpo", "--config", "trl_dpo.yaml", "--lora_r", "8"])
    )
    assert found.key("model.lora.rank") == 8
    assert found.key("data.max_tokens") == 1024
    with pytest.raises(UserError, match="cannot be read"):
        read_command("trl", ["trl", "dpo", "--config", "absent.yaml"])


def test_settings_of_the_newest_packages_are_known() -> None:
    """Of those that OpenRLHF 0.11.2, verl 0.9.1 and TRL 1.16 accept, by ends that were missed."""
    ends = {
        "openrlhf": "fsdp.enable_sleep fsdp2_enable_sleep fsdp.param_dtype",
        "verl": "actor.optim.min_lr actor.optim.lr_wsd_decay_style actor.optim.exp_avg_dtype "
        "actor.optim.muon_tp_mode actor.megatron.dynamic_context_parallel actor.megatron.dtype "
        "actor.fsdp_config.pad_to_length actor.fsdp_config.turbo_config.distributed.fsdp_plan.x "
        "model.lora.lora_A_init_method model.lora.merge model.lora.freeze_vision_model "
        "critic.fsdp.dtype rollout.router_config_path reward.reward_manager.module.path _target_",
        "trl": "ignore_bias_buffers",
    }
    for framework, names in ends.items():
        for name in names.split():
            assert find_alias(framework, name.split(".")) is not None, name
    with pytest.raises(UserError, match=r"hone rl --teacher\.path"):
        read_command("openrlhf", ["python", "-m", "openrlhf.cli.train_opd", "--opd.topk", "0"])


def test_environments_and_tools_of_a_script_are_named_by_their_file(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(
        "from trl import GRPOConfig, GRPOTrainer\n"
        "def search(query: str) -> str:\n"
        "    return query\n"
        "class Wordle:\n"
        "    def reset(self): ...\n"
        "GRPOTrainer(model='m', tools=[search], environment_factory=Wordle, "
        "args=GRPOConfig()).train()\n"
    )
    found = convert(read_file("trl", script, {}))
    assert found.key("env.path") == "RECIPE_functions.py:Wordle"
    assert found.key("env.tools") == ["RECIPE_functions.py:search"]
    assert found.taken_out is not None
    assert found.taken_out.names == ["Wordle", "search"]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("agent.agent_loop_config_path", "env.path"), ("agent.default_agent_loop", "env.path")],
)
def test_what_to_write_for_agent_loops_of_verl_is_said(name: str, wanted: str) -> None:
    words = ["verl.trainer.main_ppo", f"actor_rollout_ref.rollout.{name}=loops.yaml"]
    found = convert(read_command("verl", words))
    assert [wanted in why for one, why in found.missing if one.name.endswith(name)] == [True]


MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"


def of_tools(*settings: str) -> Imported:
    """The import of a command of verl with settings of `multi_turn`."""
    words = ["verl.trainer.main_ppo", *(f"{MULTI_TURN}.{setting}" for setting in settings)]
    return convert(read_command("verl", words))


@table(
    "settings, key, value",
    [
        (["tool_config_path=t.yaml"], "env.path", "verl:t.yaml"),
        (["interaction_config_path=u.yaml", "function_tool_path=f.py", "tool_config_path=t.yaml"],
         "env.path", "verl:t.yaml,f.py,u.yaml"),
        (["tool_config_path=$ROOT/t.yaml"], "env.path", "verl:$ROOT/t.yaml"),
        (["tool_config_path=null"], "env.path", None),
        (["tool_config_path=t.yaml", "max_assistant_turns=5"], "env.max_turns", 5),
        (["tool_config_path=t.yaml", "max_user_turns=5"], "env.max_turns", 6),
        (["tool_config_path=t.yaml", "max_user_turns=5", "max_assistant_turns=4"],
         "env.max_turns", 4),
        (["tool_config_path=t.yaml", "max_user_turns=3", "max_assistant_turns=9"],
         "env.max_turns", 4),
        (["tool_config_path=t.yaml", "max_assistant_turns=null"], "env.max_turns", 8),
        (["max_assistant_turns=5"], "env.max_turns", 8),
        (["tool_config_path=t.yaml"], "env.max_parallel_calls", 1),
        (["tool_config_path=t.yaml", "max_parallel_calls=4"], "env.max_parallel_calls", 4),
        ([], "env.max_parallel_calls", 8),
        (["tool_config_path=t.yaml", "max_tool_response_length=2048"],
         "env.max_observation_tokens", 512),
        (["tool_config_path=t.yaml"], "env.max_observation_tokens", 1024),
        (["tool_config_path=t.yaml", "format=gpt-oss"], "env.tool_format", "harmony"),
        (["tool_config_path=t.yaml", "format=glm"], "env.tool_format", "glm45"),
    ],
)  # fmt: skip
def test_tools_of_verl_become_an_environment(settings: list[str], key: str, value: object) -> None:
    found = of_tools(*settings)
    assert found.key(key) == value
    given = {one.name.rpartition(".")[2] for one in found.source.given}
    assert given <= {name.rpartition(".")[2] for name in outcomes(found)}


def test_what_means_something_else_of_the_tools_of_verl_is_said(folder: Path) -> None:
    Path("t.yaml").write_text(
        "tools:\n  - class_name: verl.tools.gsm8k_tool.Gsm8kTool\n    config: {type: native}\n"
        "  - class_name: verl.tools.mcp_base_tool.MCPBaseTool\n    config: {type: mcp}\n"
    )
    found = of_tools("tool_config_path=t.yaml", "max_tool_response_length=2048",
                     "max_parallel_calls=2", "tool_response_truncate_side=left")  # fmt: skip
    words = " ".join(found.differs)
    assert "max_tool_response_length 2048 counts characters" in words
    assert "dropped without a word there, and answered with an error here" in words
    assert "turns have no limit there; here an episode has 8 at most" in words
    assert "256 characters" not in words
    assert "which come with verl: install verl" in " ".join(found.to_do)
    assert "name it in env.tools as mcp:" in " ".join(found.to_do)
    (side,) = [why for one, why in found.missing if one.name.endswith("side")]
    assert "loses its middle" in side
    assert "are cut to 256 characters there" in " ".join(of_tools("tool_config_path=u").differs)
    assert "turns have no limit" not in " ".join(of_tools("format=hermes").differs)
    assert [one.name for one, _ in of_tools("tool_response_truncate_side=middle").missing] == []


def test_a_function_of_the_script_is_not_the_one_of_trl_of_that_name(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(
        "from trl import GRPOConfig, GRPOTrainer\n"
        "def accuracy_reward(completions, **kwargs):\n"
        "    return [0.0 for _ in completions]\n"
        "GRPOTrainer(model='m', reward_funcs=accuracy_reward, args=GRPOConfig()).train()\n"
    )
    found = convert(read_file("trl", script, {}))
    assert found.key("reward.functions.0.fn") == "RECIPE_functions.py:accuracy_reward"


def test_functions_of_whole_groups_have_groups_in_evaluation_too(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "own.py").write_text(
        "from trl import GRPOConfig, GRPOTrainer\n"
        "def score(completions, **kwargs):\n"
        "    return [0.0 for _ in completions]\n"
        "GRPOTrainer(model='model', reward_funcs=score, train_dataset='train.jsonl',\n"
        "            eval_dataset='train.jsonl',\n"
        "            args=GRPOConfig(max_steps=4, eval_steps=2, max_completion_length=2048))\n"
    )
    assert main(["import", "trl", "own.py", "--output", "mine.yaml"]) == 0
    main(["check", "rl", "mine.yaml"])
    printed = capsys.readouterr().out
    assert "whole_groups: true" in printed
    assert "whole_groups is on" not in printed
    assert "eval.max_completion_tokens is" not in printed


@table(
    "settings, steps",
    [
        ("eval_strategy='steps', eval_steps=20", 5),
        # As in transformers, whose rule this is.
        ("eval_strategy='steps', logging_steps=40", 10),
        ("eval_strategy='steps', eval_steps=0, logging_steps=40", 10),
        ("eval_strategy='steps'", 2),
        ("eval_strategy='steps', logging_steps=0.25", 10),
        ("eval_strategy='steps', eval_steps=0.1", 4),
        ("eval_strategy='no', logging_steps=40", 0),
        ("logging_steps=40", 0),
        ("eval_strategy='epoch', logging_steps=40", 0),
    ],
)
def test_steps_between_evaluations_of_trl(settings: str, steps: int, tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(
        "from trl import GRPOConfig, GRPOTrainer\n"
        "GRPOTrainer(model='m', train_dataset='a.jsonl', eval_dataset='b.jsonl', args=GRPOConfig(\n"
        "    max_steps=160, steps_per_generation=4, per_device_train_batch_size=8,\n"
        f"    gradient_accumulation_steps=1, {settings}))\n"
    )
    found = convert(read_file("trl", script, {}))
    assert found.key("run.steps") == 40
    assert found.key("eval.every_n_steps") == steps
    assert [one.name for one, _ in found.missing] == ["eval_strategy"] * ("epoch" in settings)


def test_what_is_not_followed_is_counted_and_told(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "own.py").write_text(
        "from datasets import load_dataset\n"
        "from trl import GRPOConfig, GRPOTrainer\n"
        "rows = load_dataset('openai/gsm8k', 'main', split='train').map(prepared)\n"
        "GRPOTrainer(model='m', train_dataset=rows, args=GRPOConfig(max_steps=4))\n"
    )
    assert main(["import", "trl", "own.py", "--output", "mine.yaml"]) == 0
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert first.endswith("; 1 part not followed")
    assert second.startswith("not followed: line 3: map(prepared) of openai/gsm8k is not carried")


OPEN = [
    # A command, and what the check of its recipe refuses until it is filled in.
    ("verl.trainer.main_ppo trainer.total_epochs=15", "run.steps: got 'FILL_IN'"),
    ("verl.trainer.main_ppo trainer.total_training_steps=9 custom_reward_function.path=null "
     "reward_model.enable=True", "reward.functions.0.fn 'FILL_IN'"),
]  # fmt: skip


@table("command, refused", OPEN)
def test_a_check_refuses_what_is_left_open(
    command: str, refused: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["actor_rollout_ref.model.path=model", "data.train_files=train.jsonl"]
    Path("mine.yaml").unlink(missing_ok=True)
    made = ["import", "verl", "--output", "mine.yaml", "--", *command.split(), *words]
    assert main(made) == 0
    assert main(["check", "rl", "mine.yaml"]) != 0
    printed = capsys.readouterr()
    assert refused in f"{printed.out}{printed.err}".replace("\n", " ")
