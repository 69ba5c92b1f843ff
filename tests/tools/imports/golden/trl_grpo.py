import os

from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward

BATCH = 4
dataset = load_dataset("json", data_files="train.jsonl", split="train").shuffle(seed=1)


def short(completions, **kwargs):
    return [float(len(text) < 100) for text in completions]


config = GRPOConfig(
    output_dir="runs/trl",
    per_device_train_batch_size=BATCH,
    gradient_accumulation_steps=8,
    num_generations=8,
    max_completion_length=256,
    num_iterations=2,
    steps_per_generation=16,
    max_steps=400,
    beta=0.04,
    loss_type="bnpo",
    epsilon_high=0.28,
    learning_rate=2e-6 * 1.0,
    model_init_kwargs={"dtype": "bfloat16", "revision": "v1"},
    report_to="wandb",
    seed=int(os.environ["SEED"]),
    use_vllm=True,
    vllm_importance_sampling_mode="token_truncate",
)
trainer = GRPOTrainer(
    model="Qwen/Qwen3-0.6B",
    args=config,
    reward_funcs=[accuracy_reward, short],
    train_dataset=dataset,
    peft_config=LoraConfig(r=16, lora_alpha=32, lora_dropout=0.1, target_modules=["q_proj"]),
)
trainer.train()
