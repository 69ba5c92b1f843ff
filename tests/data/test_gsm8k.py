"""GSM8K: questions become chat prompts, the number after #### the ground truth."""

import re
import time
from pathlib import Path

import pytest

from hone.config.data import ColumnsConfig, DataConfig, SourceConfig
from hone.config.errors import UserError
from hone.config.tree import SFTDataConfig
from hone.data.prompts import load_prompts
from hone.data.sft import load_sft
from tests.data.support import CHATML, bpe_tokenizer, write_rows

REAL = Path(__file__).parents[2].parent / "shared" / "data" / "gsm8k"
PATTERN = r"####\s*(.+)"

ROWS = [
    {"question": "Ann has 3 pens and buys 4. How many?", "answer": "3+4 = <<3+4=7>>7\n#### 7"},
    {"question": "A car costs $1,200. Ten cars?", "answer": "10*1200\n#### 12,000"},
    {"question": "From 5 to 2 degrees: change?", "answer": "2-5 = <<2-5=-3>>-3.\n#### -3"},
    {"question": "Half of 7?\nAs a decimal.", "answer": "7/2 = 3.5\n#### 3.5"},
    {"question": "\u00bd of a dozen?", "answer": "12/2 = <<12/2=6>>6\n####6"},
]


def load(*paths, **settings):
    sources = tuple(SourceConfig(path=str(path), answer_pattern=PATTERN) for path in paths)
    return load_prompts(DataConfig(train=sources, **settings), bpe_tokenizer(CHATML), seed=0)


def test_five_rows_of_the_same_shape(tmp_path):
    data = load(write_rows(tmp_path / "train.jsonl", ROWS), shuffle=False)
    prompts = data.train.take(5)
    assert [prompt.answer for prompt in prompts] == ["7", "12,000", "-3", "3.5", "6"]
    for row, prompt in zip(ROWS, prompts, strict=True):
        question = row["question"]
        assert prompt.text == (f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
        assert prompt.metadata == {}


def test_R22_a_row_without_number_is_named(tmp_path):
    rows = [*ROWS[:3], {"question": "q", "answer": "it is seven"}, *ROWS[3:]]
    with pytest.raises(UserError, match=r"train.jsonl, line 4: answer_pattern .* it is seven"):
        load(write_rows(tmp_path / "train.jsonl", rows))


def test_solutions_serve_as_demonstrations(tmp_path):
    path = write_rows(tmp_path / "train.jsonl", ROWS)
    columns = ColumnsConfig(answer="answer")
    cfg = SFTDataConfig(train=(SourceConfig(path=path, columns=columns),), shuffle=False)
    tokenizer = bpe_tokenizer(CHATML)
    rows = load_sft(cfg, tokenizer, seed=0).train.take(5)
    for row, source in zip(rows, ROWS, strict=True):
        learnt = [i for i, mask in zip(row.token_ids, row.loss_mask, strict=True) if mask]
        assert tokenizer.decode(learnt) == source["answer"] + "<|im_end|>"


@pytest.mark.skipif(not REAL.is_dir(), reason=f"the GSM8K files are not at {REAL}")
def test_the_real_files():
    begin = time.perf_counter()
    data = load(REAL / "train.jsonl", eval=(_source("test"),), max_prompt_tokens=2000)
    seconds = time.perf_counter() - begin
    assert (len(data.train), len(data.eval)) == (7473, 1319)
    assert data.report.dropped == []
    numbers = [prompt.answer for prompt in [*data.train.take(7473), *data.eval]]
    assert all(re.fullmatch(r"-?[\d,]+(\.\d+)?", number or "") for number in numbers)
    first = data.eval[0]
    assert (first.id, first.answer, first.task) == ("gsm8k:1", "18", "gsm8k")
    assert seconds < 30


def _source(split: str) -> SourceConfig:
    return SourceConfig(path=str(REAL), split=split, answer_pattern=PATTERN)
