"""What people type wrongly: each is refused with its cause and a remedy, without a traceback."""

from __future__ import annotations

import gzip
import os
import shlex
from pathlib import Path

import pytest

from hone.cli.main import main
from tests.config import workspace as files
from tests.tables import table

GOOD = "model: {path: model}\ndata: {train: [{path: train.jsonl}]}\n"
FILES: dict[str, str | bytes] = {
    "lora/adapter_config.json": "{}",
    "r.yaml": GOOD,
    "bad.yaml": "model: {path: model\n",
    "tab.yaml": "model:\n\tpath: model\n",
    "list.yaml": "- a\n",
    "twice.yaml": "run: {steps: 1, steps: 2}\n",
    "binary.yaml": b"\xff\xfe\x00",
    "names.yaml": GOOD + "trainer: {learning_rate: 1}\nrollout: {n_sample: 3}\n",
    "sft.yaml": GOOD + "trainer: {prompts_per_minibatch: 1}\n",
    "flat.yaml": "model: x\ndata: {train: t.jsonl}\n",
    "arun/config.yaml": "{}",
    "text.jsonl": "hello\n",
    "other.jsonl": '{"x": 1}\n',
    "none.jsonl": "",
    "latin.jsonl": '{"prompt": "café"}\n'.encode("latin-1"),
    "packed.jsonl": gzip.compress(b'{"prompt": "1+1="}\n'),
    "nested.jsonl": '{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}\n",
    "digits.jsonl": '{"prompt": "1", "answer": ' + "1" * 5000 + "}\n",
    "nulls.jsonl": '{"prompt": null, "answer": "1"}\n',
    "nested.yaml": "a: " + "[" * 1200,
    "torn/config.json": "{",
    "array/config.json": "[]",
    "minus/config.json": '{"model_type": "qwen3", "num_hidden_layers": -1}',
    "spelt/config.json": '{"model_type": "qwen3", "torch_dtype": "torch.float16"}',
    "word/config.json": '{"model_type": "qwen3", "num_attention_heads": "four"}',
    "file": "",
}
ROWS: list[tuple[str, str]] = [
    # commands and recipes
    ("rll", "no command 'rll'. Did you mean `hone rl`?"),
    ("rl", "model.path: required."),
    ("rl", "Set it in the recipe or with --data.train.0.path VALUE"),
    ("rl nosuch", "no recipe of that name comes with hone. Give the path of a YAML file"),
    ("rl nosuch.yaml", "no such file"),
    ("rl empty", "a folder, not a file"),
    ("rl bad.yaml", "not valid YAML: line 2, column 1"),
    ("rl tab.yaml", r"found character '\t'"),
    ("rl list.yaml", "must be a mapping of keys to values"),
    ("rl twice.yaml", "line 1: the key 'run.steps' is given twice; keep one of them"),
    ("rl binary.yaml", "cannot be read"),
    ("rl train.jsonl", "is a file of data. A recipe is a YAML file; data are named with --data"),
    ("rl nested.yaml", "recipe 'nested.yaml' is nested too deep"),
    ("rl names.yaml", "did you mean trainer.optimizer.lr?"),
    ("rl names.yaml", "did you mean rollout.n_samples_per_prompt?"),
    ("sft sft.yaml", "it is a key of `hone rl`, `hone plan`, "),
    ("rl r.yaml r.yaml", "the recipe goes first"),
    # keys and values
    ("rl r.yaml --run.step 3", "did you mean --run.steps?"),
    ("rl r.yaml run.steps 3", "not a flag; the recipe goes first, flags are `--key value`; did"),
    ("rl r.yaml -n 3", "-n: not a flag"),
    ("rl r.yaml --run.steps", "needs a value; allowed: whole number >= 1"),
    ("rl r.yaml --run.steps three", "got 'three' (flag --run.steps three); allowed: whole"),
    ("rl r.yaml --run.steps 0", "got 0 (flag --run.steps 0); allowed: whole number >= 1"),
    ("rl r.yaml --run.steps 1.5", "got 1.5"),
    ("rl r.yaml --run.steps=", "allowed: whole number >= 1"),
    ("rl r.yaml --rollout.n_samples_per_prompt true", "got True"),
    ("rl r.yaml --trainer.optimizer.lr 1e-6x", "got '1e-6x'"),
    ("rl r.yaml --trainer.optimizer.lr nan", "allowed: number >= 0"),
    ("rl r.yaml --algorithm.loss ppo", "allowed: one of cispo, gmpo, gspo, ppo_clip"),
    ("rl r.yaml --log.to wandb,mlflow", "for example --log.to '[wandb, mlflow]'"),
    ("rl r.yaml --gpu h200", "a flag of `hone check` alone"),
    ("rl r.yaml --actor_rollout_ref.actor.optim.lr 1", "did you mean --trainer.optimizer.lr?"),
    ("rl r.yaml --per_device_train_batch_size 8", "did you mean --trainer.micro_batch_size"),
    ("eval r.yaml --rollout.temperature 1", "did you mean --eval.temperature?"),
    ("rl r.yaml --run.dir ''", "run.dir: is empty"),
    ("rl r.yaml --run.dir '~/runs'", "run.dir: begins with `~`, which is not expanded here"),
    ("rl r.yaml --model.path '~/m'", f"give {os.path.expanduser('~/m')}"),
    ("rl r.yaml --gpus 2", "--nproc N behind the command starts N processes on this host"),
    ("rl r.yaml --num_gpus 2", "--nproc N behind the command starts N processes on this host"),
    ("rl r.yaml --model.shape qwen3-8b", "Name the model in --model.path"),
    ("check r.yaml --model.shape qwen3-8c", "is no public shape that hone knows"),
    ("rl r.yaml --trainer.optimizer '{<<: {lr: 1}}'", "recipes have no merge keys"),
    ("rl r.yaml --run.dir " + "x" * 300, "run.dir: has a name of more than 255 bytes"),
    ("rl r.yaml --run.dir file", "run.dir 'file' is a file. Name another folder."),
    # processes and devices
    ("rl r.yaml --nproc", "--nproc takes the number of processes to start, 1 or more"),
    ("rl r.yaml --nproc two", "got 'two'"),
    ("rl r.yaml --nproc 2 --nproc 2", "--nproc is given 2 times; give it once"),
    ("rl r.yaml --nproc 99 --run.device cpu", "Set --nproc to at most"),
    ("check r.yaml --gpu h300", "which hone's table lacks; it has H200"),
    ("plan r.yaml --plan.gpu h300", "which hone's table lacks; it has H200"),
    ("plan r.yaml --nproc 3", "set plan.gpus instead"),
    ("rl r.yaml --engine.backend vllm", "pip install"),
    ("rl r.yaml --log.to '[wandb]'", "pip install 'wandb>=0.20'"),
    # models
    ("rl r.yml", "Did you mean 'r.yaml'?"),
    ("rl tabs", "Did you mean 'tab.yaml'?"),
    ("rl r.yaml --model.path nosuch", "Give a folder with config.json, or a hub name"),
    ("rl r.yaml --model.path train.jsonl", "is a file. Give the folder it is in."),
    ("rl r.yaml --model.path empty", "holds no config.json"),
    ("rl r.yaml --model.path lora", "a LoRA adapter, and whole models are read"),
    ("rl r.yaml --reward.model.path lora", "a LoRA adapter, and whole models are read"),
    ("rl r.yaml --model.path torn", "the config.json of model.path 'torn' is not valid JSON"),
    ("rl r.yaml --model.path array", "is a list and not an object. Get the model again"),
    ("rl r.yaml --model.path minus", "holds num_hidden_layers = -1, where a whole number"),
    ("rl r.yaml --model.path word", "holds num_attention_heads = 'four', where a whole number"),
    ("rl r.yaml --model.path spelt", "holds torch_dtype = 'torch.float16', where transformers"),
    ("eval quickstart-eval", "Run `hone quickstart` first, which makes it"),
    ("rl r.yaml --model.path bare", "holds no weights"),
    ("rl r.yaml --model.path mute", "Set model.tokenizer to a folder or hub name."),
    ("rl r.yaml --data.max_prompt_tokens 5000", "Lower data.max_prompt_tokens"),
    # data
    ("rl r.yaml --data x.jsonl", "did you mean --data.train.0.path x.jsonl?"),
    ("rl r.yaml --model x", "did you mean --model.path x?"),
    ("rl r.yaml --reward r.py:f", "did you mean --reward.functions.0.fn r.py:f?"),
    ("rl flat.yaml", "did you mean model: {path: x}?"),
    ("rl flat.yaml", "did you mean train: [{path: t.jsonl}]?"),
    ("generate r.yaml --prompt Hi", "prompts are rows of a file"),
    ("train r.yaml", "Did you mean `hone rl` or `hone sft`?"),
    ("grpo r.yaml", "Did you mean `hone rl`?"),
    ("report .", "It holds runs: arun."),
    ("rl r.yaml --data.train x.jsonl", "did you mean --data.train.0.path x.jsonl?"),
    ("rl r.yaml --data.train '[{path: x'", "line 1, column 10"),
    ("rl r.yaml --data.train.3.path x.jsonl", "which has 1 entries: the next is 1"),
    ("rl r.yaml --data.train.0.path no.jsonl", "there is no 'no.jsonl'"),
    ("rl r.yaml --data.train.0.path text.jsonl", "line 1: not valid JSON"),
    ("rl r.yaml --data.train.0.path other.jsonl", "Name the right one in `columns.prompt`"),
    ("rl r.yaml --data.train.0.path none.jsonl", "holds no rows"),
    ("rl r.yaml --data.train.0.path notes.txt", "Use a file in one of these formats: .jsonl"),
    ("rl r.yaml --data.train.0.path ''", "data.train.0.path: is empty"),
    ("rl r.yaml --data.train.0.path file", "has no suffix. Use a file in one of these formats"),
    ("rl r.yaml --data.train.0.path s3://b/y.jsonl", "pip install 's3fs>=2025.3'"),
    ("rl r.yaml --data.train.0.path latin.jsonl", "Save the file as UTF-8, for example with iconv"),
    ("rl r.yaml --data.train.0.path packed.jsonl", "the file is compressed; name it .jsonl.gz"),
    ("rl r.yaml --data.train.0.path nested.jsonl", "JSON that Python cannot read"),
    ("rl r.yaml --data.train.0.path digits.jsonl", "JSON that Python cannot read"),
    ("rl r.yaml --data.train.0.path nulls.jsonl", "found prompt (null in all rows looked at)"),
    ("rl r.yaml --eval.every_n_steps 5", "there is nothing to evaluate on"),
    ("generate r.yaml --output empty", "is a folder. Give the path of a new file."),
    # rewards
    ("rl r.yaml --reward.functions math", "did you mean --reward.functions.0.fn math?"),
    ("rl r.yaml --reward.functions.0.fn no.py:score", "there is no file 'no.py'"),
    ("rl r.yaml --reward.functions.0.fn scores.py", "your own: package.module:function or"),
    ("rl r.yaml --reward.functions.0.fn broken.py:score", "line 1 of 'broken.py' is not valid"),
    ("rl r.yaml --reward.functions.0.fn exact_mach", "exact_match"),
    ("rl r.yaml --rollout.temperature 0", "Set rollout.temperature to 1"),
    # other commands
    ("report nosuch", "nosuch is no run: give the folder that `run.dir` named"),
    ("watch nosuch", "nosuch is no run: give the folder that `run.dir` named"),
    ("watch arun --port 99999", "--port is 99999; allowed: 1024 to 65535, or 0"),
    ("trace nosuch", "nosuch is no run"),
    ("trace arun", "Set profile.train.steps or profile.rollout.steps, such as [10]"),
    ("import veRL r.yaml", "there is nothing to import from 'veRL'. There are openrlhf, verl"),
    ("import verl nosuch.sh", "there is no file 'nosuch.sh'. Name a shell script"),
    ("import verl file", "runs nothing of verl's that trains"),
    ("plan r.yaml --plan.goal fastest", "allowed: one of throughput, on_policy, memory"),
    ("bench gpu", "there is `hone bench engine`, `hone bench train` and `hone bench data`"),
    ("bench engine", "Name a folder (or hub name) in model.path, or a public shape"),
    ("bench train --model.shape qwen3-600b", "allowed: one of qwen3-0.6b"),
    ("recipes show gsm", "Did you mean `gsm8k`?"),
    ("recipes copy gsm8k no/x.yaml", "there is no folder 'no'"),
    ("completion csh", "takes one of bash, zsh, fish, got 'csh'"),
    ("quickstart --dir /proc/x", "a folder where nothing can be written"),
    ("tune r.yaml --output /proc/x.yaml", "output '/proc/x.yaml' cannot be written"),
    ("quickstart --dir empty", "Remove the folder, or choose another --dir"),
    ("rl r.yaml --help rolout", "Did you mean rollout?"),
]


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    files.fill(tmp_path)
    for name, content in FILES.items():
        data = content if isinstance(content, bytes) else content.encode()
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@table("line, told", ROWS)
def test_it_is_refused_with_cause_and_remedy(
    line: str, told: str, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = set(workspace.iterdir())
    assert main(shlex.split(line)) == 2
    text = capsys.readouterr().err
    assert "error: " in text
    assert told in " ".join(text.split()), text
    assert "Traceback" not in text
    assert "HONE_TRACEBACK" not in text, "a mistake that nobody has put into words"
    assert set(workspace.iterdir()) == before, "nothing was written"


def test_a_damaged_tokenizer_is_told_here_and_in_the_run_folder(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which is seen only where it is loaded, in a run that has begun."""
    assert main(["rl", "r.yaml", "--run.device=cpu", "--log.to=[]"]) == 2
    told = "the tokenizer at model.path='model' cannot be read: "
    assert told in capsys.readouterr().err
    folder = workspace / "runs" / "r"
    assert told in (folder / "events.jsonl").read_text()
