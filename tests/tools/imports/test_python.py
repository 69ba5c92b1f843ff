"""Python scripts for TRL are read as they would run; what they would do by themselves is said."""

from __future__ import annotations

from pathlib import Path

from hone.tools.imports.convert import convert
from hone.tools.imports.frameworks import read_file
from hone.tools.imports.imported import Imported
from tests.tables import table


def imported(folder: Path, text: str, **environment: str) -> Imported:
    script = folder / "run.py"
    script.write_text(f"from trl import GRPOConfig, GRPOTrainer\n{text}\n")
    return convert(read_file("trl", script, environment))


TRAINER = "GRPOTrainer(model='m', args=GRPOConfig(learning_rate=LR), train_dataset='d')"
LR = "trainer.optimizer.lr"
VALUES = [
    # Lines, and what the recipe has.
    (f"LR = 1e-5\nLR = 2e-5\n{TRAINER}\nLR = 3e-5", {}, {LR: 2e-5}),
    (f"def other():\n    LR = 1e-5\nLR = 2e-5\n{TRAINER}", {}, {LR: 2e-5}),
    (f"LR = 1e-5\ndef main():\n    LR = 2e-5\n    {TRAINER}\nmain()", {}, {LR: 2e-5}),
    (f"BIG = False\nif BIG:\n    LR = 1e-5\nelse:\n    LR = 2e-5\n{TRAINER}", {}, {LR: 2e-5}),
    (f"N = 8\nif N > 4 and not N == 5:\n    LR = 1e-5\nelse:\n    LR = 2e-5\n{TRAINER}", {},
     {LR: 1e-5}),
    (f"LR: float = 1e-6\nLR *= 2 + 2\nif __name__ == '__main__':\n    {TRAINER}", {}, {LR: 4e-6}),
    (f"import os\nLR = float(os.environ.get('LR', '2e-5'))\n{TRAINER}", {}, {LR: 2e-5}),
    (f"import os\nLR = float(os.environ['LR'])\n{TRAINER}", {"LR": "3e-5"}, {LR: 3e-5}),
    (f"import argparse\nparser = argparse.ArgumentParser()\n"
     f"parser.add_argument('--my-lr', type=float, default=4e-5)\nargs = parser.parse_args()\n"
     f"LR = args.my_lr\n{TRAINER}", {}, {LR: 4e-5}),
    (f"LR = 1e-5 if False else 2e-5\n{TRAINER}", {}, {LR: 2e-5}),
    ("c = GRPOConfig(learning_rate=1e-5)\nc.learning_rate = 2e-5\n"
     "c.max_completion_length = 2 * 64\nGRPOTrainer(args=c)", {},
     {LR: 2e-5, "rollout.max_completion_tokens": 128}),
    ("a = GRPOConfig(learning_rate=1e-5)\nb = GRPOConfig(learning_rate=2e-5)\nGRPOTrainer(args=a)",
     {}, {LR: 1e-5}),
    ("more = {'learning_rate': 1e-5}\nGRPOTrainer(args=GRPOConfig(**more))", {}, {LR: 1e-5}),
    ("name = 'Qwen/Qwen3-0.6B'\nmodel = AutoModelForCausalLM.from_pretrained(name)\n"
     "tokenizer = AutoTokenizer.from_pretrained(name)\n"
     "GRPOTrainer(model=model, processing_class=tokenizer)", {}, {"model.path": "Qwen/Qwen3-0.6B"}),
    ("model, tokenizer = FastLanguageModel.from_pretrained(model_name='m', max_seq_length=8)\n"
     "GRPOTrainer(model)", {}, {"model.path": "m"}),
    ("size = 8\nGRPOTrainer(model=f'Qwen/Qwen3-{size}B')", {}, {"model.path": "Qwen/Qwen3-8B"}),
    ("data = load_dataset('d', 'sub')\nGRPOTrainer(train_dataset=data['train'], "
     "eval_dataset=data['test'])", {},
     {"data.train.0.path": "d", "data.train.0.subset": "sub", "data.train.0.split": "train",
      "data.eval.0.path": "d", "data.eval.0.split": "test"}),
    ("a, b = load_dataset('d', split=['train[:5%]', 'test[:5%]'])\n"
     "GRPOTrainer(train_dataset=a, eval_dataset=b)", {},
     {"data.train.0.split": "train[:5%]", "data.eval.0.split": "test[:5%]"}),
]  # fmt: skip


@table("text, environment, expected", VALUES)
def test_the_value_is_that_of_the_line_that_runs_last(
    text: str, environment: dict[str, str], expected: dict[str, object], tmp_path: Path
) -> None:
    found = imported(tmp_path, text, **environment)
    assert {key: found.key(key) for key in expected} == expected
    assert not found.source.notes or "--my-lr" in text


SAID = [
    # Lines, and what is said.
    ("data = load_dataset('d').map(tidy)\nGRPOTrainer(train_dataset=data['train'])",
     "line 2: map(tidy) of d is not carried over: rows are read as they are stored"),
    ("data = load_dataset('d', split='train').filter(lambda row: row['a'])\n"
     "data = data.select(range(8))\nGRPOTrainer(train_dataset=data)",
     "line 3: select(range(8)) of d is not carried over"),
    ("data = load_dataset('d', split='train').train_test_split(0.1)\n"
     "GRPOTrainer(train_dataset=data['train'])", "data.eval_fraction keeps rows out of training"),
    (f"LR = 1e-5\nif cuda():\n    LR = 2e-5\n{TRAINER}",
     "whether LR is set as in line 4 is known only when the script runs; it is taken"),
    (f"LR = 1e-5\nfor LR in rates:\n    pass\n{TRAINER}", "LR"),
    (f"def main(LR=1e-5):\n    {TRAINER}", "LR"),
    ("GRPOTrainer(model=build(1), args=GRPOConfig())", "build(1)"),
    ("_, training_args = parser.parse_args_and_config()\nGRPOTrainer(args=training_args)",
     "what args=training_args holds is not in the script, and not read"),
    ("model = AutoModelForCausalLM.from_pretrained('m', quantization_config=four_bit)\n"
     "GRPOTrainer(model=model)", "quantization_config"),
    ("parser.add_argument('--lr', default=1)\na = parser.parse_args()\n"
     "GRPOTrainer(args=GRPOConfig(learning_rate=a.lr))",
     "line 2: the flag lr counts as its default"),
]  # fmt: skip


@table("text, words", SAID)
def test_what_only_a_run_could_tell_is_said(text: str, words: str, tmp_path: Path) -> None:
    found = imported(tmp_path, text)
    unread = [f"{one.name} {one.value}" for one, _ in [*found.unread, *found.missing]]
    assert any(words in note for note in [*found.source.notes, *unread]), found.source.notes
    assert not any("(" in str(value.value) for value in found.values.values())
