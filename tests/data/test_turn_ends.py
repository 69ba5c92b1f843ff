"""Which tokens end what a model says, from a row to what is trained and to the text of a sample."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from hone.config.tree import DPOConfig, PairsDataConfig, SFTConfig, SFTDataConfig
from hone.data.chat import Demonstration, Renderer
from hone.data.columns import choose_columns, map_rows
from hone.data.pairs import load_pairs
from hone.data.settings import DataConfig, PairSourceConfig, SourceConfig
from hone.data.sft import load_sft
from hone.data.sources import SourceRow
from hone.data.turns import TurnRenderer
from hone.errors import UserError
from hone.loops import supervised
from hone.models.load import load_end_ids
from hone.models.settings import ModelConfig
from hone.models.support import silent_token_ids
from hone.models.tiny import make_tiny_model
from hone.models.tokenizer import decoder
from hone.observe.loggers import completion_row, pair_row
from hone.rollout.judge import Transcripts
from hone.types import Observation, Prompt, Sample, StopReason, Turn
from tests.data.support import (
    CHATML,
    GEMMA,
    OPENS_THINKING,
    REWRITES_HISTORY,
    dialect,
    ids_of,
    write_rows,
)
from tests.tables import table

ENDS = {
    "gemma": ("<eos>", "<end_of_turn>"),
    "llama3": ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    "qwen": ("<|endoftext|>", "<|im_end|>"),
}
"""What the generation_config.json of each declares."""
GEMMA_CLOSES = GEMMA.replace(
    "{% if add_generation_prompt %}", "{% if not add_generation_prompt %}<eos>{% else %}"
)
"""As Phi's: behind the last turn the text ends, too."""


def demonstrations(
    tokenizer: PreTrainedTokenizerFast, row: dict[str, Any], ends: tuple[str, ...], **settings: Any
) -> list[Demonstration]:
    rows, source = [SourceRow(row, "f, line 1")], SourceConfig(path="f.jsonl")
    columns = choose_columns(rows, source, demonstrations=True)
    cfg = DataConfig(train=(), **settings)
    renderer = Renderer(tokenizer, cfg, end_ids=ids_of(tokenizer, *ends))
    return renderer.demonstrations(map_rows(rows, source, columns, name="f"))


def trained(
    tokenizer: PreTrainedTokenizerFast,
    row: dict[str, Any],
    ends: tuple[str, ...] = (),
    **settings: Any,
) -> str:
    """What is trained of a row, as the tokens spell it."""
    (found,) = demonstrations(tokenizer, row, ends, **settings)
    return str(tokenizer.decode([*found.token_ids[found.num_prompt_tokens :]]))


SUM = {"prompt": "1+1", "completion": "2"}


# -- what is trained -----------------------------------------------------------------------------


@table(
    "tokenizer, ends, said, expected",
    [
        (dialect("gemma"), ENDS["gemma"], "2", "2<end_of_turn>"),
        (dialect("gemma", GEMMA_CLOSES), ENDS["gemma"], "2", "2<end_of_turn>"),
        (dialect("llama3"), ENDS["llama3"], "2", "2<|eot_id|>"),
        (dialect("llama3", eos_token="<|end_of_text|>"), ENDS["llama3"], "2", "2<|eot_id|>"),
        (dialect("qwen"), ENDS["qwen"], "2", "2<|im_end|>"),
        # Where nothing declares the template's, sampling goes on to the tokenizer's.
        (dialect("gemma"), (), "2", "2<end_of_turn>\n<eos>"),
        (dialect("qwen", eos_token="<|endoftext|>"), (), "2", "2<|im_end|>\n<|endoftext|>"),
        # A text that has the end token already, or another one; and one that goes on behind it.
        (dialect("gemma"), ENDS["gemma"], "2<end_of_turn>", "2<end_of_turn>"),
        (dialect("gemma", None), ENDS["gemma"], "2<end_of_turn>\n", "2<end_of_turn>"),
        (dialect("gemma", None), ENDS["gemma"], "2", "2<eos>"),
        (dialect("gemma", None), ENDS["gemma"], "2<eos>or 3", "2<eos>or 3<eos>"),
        (dialect("gemma"), ENDS["gemma"], "2<eos>or 3", "2<eos>or 3<end_of_turn>"),
        (
            dialect("qwen", REWRITES_HISTORY),
            ENDS["qwen"],
            "2<|im_end|>or 3",
            "2<|im_end|>or 3<|im_end|>",
        ),
    ],
)
def test_a_demonstration_ends_where_sampling_ends(
    tokenizer: PreTrainedTokenizerFast, ends: tuple[str, ...], said: str, expected: str
) -> None:
    assert trained(tokenizer, {"prompt": "1+1", "completion": said}, ends) == expected


@table(
    "said, expected",
    [
        ("<b>2</b>3", "<b>2</b>3"),
        ("<b>2", "<b>2"),
        ("<b>2</b></b>", "<b><b>2</b></b>"),
    ],
)
def test_a_tag_that_the_prompt_has_opened_is_trained_once(said: str, expected: str) -> None:
    """Rows of `hone generate` repeat it; an element of that name that lies in it does not."""
    tokenizer = dialect("qwen")
    (row,) = demonstrations(
        tokenizer, {"prompt": "1+1 <b>", "completion": said}, ENDS["qwen"], chat="never"
    )
    text = str(tokenizer.decode(row.token_ids)).removesuffix("<|im_end|>")
    assert text == f"1+1 {expected}"


def folder_of(
    folder: Path, tokenizer: PreTrainedTokenizerFast, ends: tuple[str, ...]
) -> ModelConfig:
    make_tiny_model(folder, tokenizer=tokenizer, hidden_size=8, num_layers=1, weights=False)
    declared = {"eos_token_id": ids_of(tokenizer, *ends)}
    (folder / "generation_config.json").write_text(json.dumps(declared))
    return ModelConfig(path=str(folder))


def test_runs_train_to_the_ends_that_the_model_declares(tmp_path: Path) -> None:
    """Demonstrations and both completions of a preference: SimPO and ORPO count their tokens."""
    tokenizer = dialect("gemma")
    model = folder_of(tmp_path / "model", tokenizer, ENDS["gemma"])
    sft = {"path": write_rows(tmp_path / "s.jsonl", [SUM])}
    pair = {"prompt": "1+1", "chosen": "2", "rejected": "11"}
    pairs = {"path": write_rows(tmp_path / "p.jsonl", [pair])}
    run: dict[str, Any] = {"dir": tmp_path / "run", "steps": 1}
    fields: dict[str, Any] = {"model": {"path": model.path}, "run": run}
    sft_cfg = SFTConfig.model_validate({**fields, "data": {"train": [sft]}})
    dpo_cfg = DPOConfig.model_validate({**fields, "data": {"train": [pairs]}})
    (row,) = supervised.load_rows(sft_cfg, tokenizer).train.first_rows()
    (preference,) = supervised.load_rows(dpo_cfg, tokenizer).train.first_rows()
    assert [sum(row.loss_mask) for row in (row, *preference.rows)] == [2, 2, 3]


@table("stop_reason", [*StopReason, "stop", None])
def test_what_was_cut_as_it_was_sampled_is_trained_without_an_end(
    stop_reason: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows as `hone generate` writes them, also of templates that would close a thought."""
    unfinished = ("length", "max_turns", "deadline", "abort", "error")
    tokenizer, cut = dialect("qwen"), stop_reason in unfinished
    end = "" if cut else "<|im_end|>"
    told = {} if stop_reason is None else {"stop_reason": str(stop_reason)}
    rows = [{"prompt": "1+1", "completion": "<think>so 1", **told}]
    cfg = SFTDataConfig(train=(SourceConfig(path=write_rows(tmp_path / "s.jsonl", rows)),))
    with caplog.at_level(logging.INFO):
        (row,) = load_sft(cfg, tokenizer, seed=0).train.first_rows()
    assert str(tokenizer.decode(row.token_ids)).endswith(f"assistant\n<think>so 1{end}")
    assert ("1 of 1 completions were cut" in caplog.text) == cut


@table("for_reward_model", [False, True])
def test_each_completion_of_a_pair_ends_or_does_not(for_reward_model: bool, tmp_path: Path) -> None:
    tokenizer = dialect("gemma")
    row = {"prompt": "1+1", "chosen": "2", "rejected": "3"}
    stops = [{}, {"stop_reason": "length"}, {"rejected_stop_reason": "length"}]
    path = write_rows(tmp_path / "p.jsonl", [row | stop for stop in stops])
    cfg = PairsDataConfig(train=(PairSourceConfig(path=path),), shuffle=False)
    data = load_pairs(
        cfg,
        tokenizer,
        seed=0,
        for_reward_model=for_reward_model,
        end_ids=ids_of(tokenizer, *ENDS["gemma"]),
    )
    asked = "<start_of_turn>model\n"
    said = [
        [str(tokenizer.decode(row.token_ids)).partition(asked)[2].strip() for row in pair.rows]
        for pair in data.train.first_rows()
    ]
    assert said == [
        ["2<end_of_turn>", "3<end_of_turn>"],
        ["2", "3<end_of_turn>"],
        ["2<end_of_turn>", "3"],
    ]


def test_nothing_can_be_learned_of_what_was_cut_at_once(tmp_path: Path) -> None:
    row = {"prompt": "1+1", "chosen": "2", "rejected": "", "rejected_stop_reason": "length"}
    path = write_rows(tmp_path / "p.jsonl", [row])
    cfg = PairsDataConfig(train=(PairSourceConfig(path=path),))
    with pytest.raises(UserError, match=r"line 1: .* cut before it said anything"):
        load_pairs(cfg, dialect("qwen"), seed=0)


CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
}


def test_a_call_of_a_tool_is_trained_as_the_template_writes_it() -> None:
    row = {"messages": [{"role": "user", "content": "1+1"}, CALL]}
    expected = '<|python_tag|>add({"a": 1})<|eom_id|>'
    assert trained(dialect("llama3"), row, ENDS["llama3"]) == expected


@table(
    "template, message",
    [
        (CHATML, "line 1: the chat template leaves out the call of 'add' in message 2. Name"),
        (None, "line 1: it is rendered without chat template, so .* tool_calls cannot be"),
    ],
)
def test_a_call_that_would_be_left_out_is_refused(template: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        trained(dialect("qwen", template), {"prompt": "1+1", "completion": [CALL]})


# -- what a reward model reads -------------------------------------------------------------------


@table("name", ENDS)
def test_a_truncated_completion_is_read_as_an_unfinished_one(name: str) -> None:
    """Whatever the model declares: the template alone knows how a turn ends."""
    tokenizer = dialect(name)
    transcripts = Transcripts(
        tokenizer, DataConfig(train=()), max_tokens=99, path="judge", vocab_size=999
    )
    prompt = Prompt(id="1", token_ids=(1,), text="1+1", unrendered="1+1")
    whole, cut = (
        str(
            tokenizer.decode(transcripts.of(prompt, "It is 2", is_truncated=is_truncated).token_ids)
        )
        for is_truncated in (False, True)
    )
    assert cut.endswith("It is 2")
    assert whole.startswith(cut)
    assert whole.removeprefix(cut).strip() in ENDS[name]


def test_it_reads_the_thoughts_whose_tag_the_policys_prompt_has_opened() -> None:
    tokenizer = dialect("qwen")
    transcripts = Transcripts(
        tokenizer, DataConfig(train=()), max_tokens=99, path="judge", vocab_size=999
    )
    prompt = Prompt(id="1", token_ids=(1,), text="assistant\n<think>\n", unrendered="1+1")
    for said in ("so\n</think>2", "<think>\nso\n</think>2"):
        found = tokenizer.decode(transcripts.of(prompt, said, is_truncated=False).token_ids)
        assert str(found).endswith("assistant\n<think>\nso\n</think>2<|im_end|>\n")


# -- the text of a sample ------------------------------------------------------------------------


@table(
    "tokenizer, ends, sampled, expected",
    [
        (dialect("gemma"), ENDS["gemma"], "2<end_of_turn>", "2"),
        (dialect("gemma"), ENDS["gemma"], "2<eos><pad>", "2"),
        (dialect("gemma"), (), "2<end_of_turn>\n<eos>", "2\n"),
        (dialect("llama3"), ENDS["llama3"], "<|python_tag|>f()<|eom_id|>", "<|python_tag|>f()"),
        (
            dialect("qwen"),
            ENDS["qwen"],
            "<think>so</think><tool_call>f</tool_call><|im_end|><|endoftext|>",
            "<think>so</think><tool_call>f</tool_call>",
        ),
        (dialect("qwen", eos_token="<|endoftext|>"), (), "2<|im_end|>\n<|endoftext|>", "2\n"),
        (dialect("qwen", None), ("<|im_end|>",), "<|im_start|>2<|im_end|>", "<|im_start|>2"),
        (dialect("qwen"), ENDS["qwen"], "", ""),
    ],
)
def test_only_what_ends_or_pads_is_cut_from_the_text(
    tokenizer: PreTrainedTokenizerFast, ends: tuple[str, ...], sampled: str, expected: str
) -> None:
    declared = ids_of(tokenizer, *ends, str(tokenizer.eos_token))
    ids = tokenizer(sampled, add_special_tokens=False)["input_ids"]
    assert decoder(tokenizer, declared)(ids) == expected


def test_a_template_that_refuses_a_plain_question_ends_no_turn_of_its_own() -> None:
    tokenizer = dialect("qwen", "{{ raise_exception('tools alone') }}")
    assert silent_token_ids((), tokenizer) == {*ids_of(tokenizer, "<|endoftext|>")}


def test_what_is_sampled_is_trained_again_as_it_was(tmp_path: Path) -> None:
    """`hone generate`, then `hone sft`: every token of a completion that ended comes back."""
    for name, sampled in {
        "qwen": "<think>so</think><tool_call>f</tool_call>2<|im_end|>",
        "llama3": "<|python_tag|>f()<|eot_id|>",
        "gemma": "2<end_of_turn>",
    }.items():
        tokenizer = dialect(name)
        ends = load_end_ids(folder_of(tmp_path / name, tokenizer, ENDS[name]), tokenizer)
        ids = tokenizer(sampled, add_special_tokens=False)["input_ids"]
        row = {"prompt": "1+1", "completion": decoder(tokenizer, ends)(ids), "stop_reason": "eos"}
        assert trained(tokenizer, row, ENDS[name]) == sampled


@table(
    "sampled, expected",
    [
        ("<|im_end|>", "\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n"),
        ("<|endoftext|>", "\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n"),
        ("</tool_call>", "<|im_end|>\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n"),
    ],
)
def test_a_turn_is_ended_once_whichever_end_was_sampled(sampled: str, expected: str) -> None:
    """The last one is of `rollout.stop`, and ends no turn by itself."""
    tokenizer = dialect("qwen")
    ids = [*ids_of(tokenizer, "2", sampled)]
    asked = ({"role": "user", "content": "1+1"},)
    text = tokenizer.apply_chat_template([*asked], tokenize=False, add_generation_prompt=True)
    sample = Sample(
        id="1/0",
        prompt=Prompt(id="1", token_ids=(1,), text=str(text), messages=asked),
        index=0,
        token_ids=ids,
        logprobs=[0.0, 0.0],
        weight_versions=[0, 0],
        loss_mask=[True, True],
        stop_reason=StopReason.EOS,
        turns=[Turn(start=0, end=2, text="2", stop_reason=StopReason.EOS)],
    )
    ends = ids_of(tokenizer, *ENDS["qwen"])
    render = TurnRenderer(tokenizer, DataConfig(train=()), vocab_size=len(tokenizer), end_ids=ends)
    appended = render(sample, Observation("no")).token_ids
    assert tokenizer.decode([*appended]) == expected


def sampled(text: str, number: int, stop_reason: StopReason) -> Sample:
    prompt = Prompt(id="1", token_ids=(1,), text="user\n<think>\n", unrendered="1+1")
    return Sample(
        id=f"1/{number}",
        prompt=prompt,
        index=number,
        token_ids=[1],
        logprobs=[0.0],
        weight_versions=[0],
        loss_mask=[True],
        stop_reason=stop_reason,
        text=text,
    )


def test_generated_rows_have_what_training_reads() -> None:
    """Whether each completion ended, and the tag that its prompt has opened."""
    best = sampled("so</think>2", 0, StopReason.EOS)
    worst = sampled("so", 1, StopReason.LENGTH)
    assert completion_row(best)["completion"] == "<think>\nso</think>2"
    row = pair_row(best, worst)
    assert (row["chosen"], row["rejected"]) == ("<think>\nso</think>2", "so")
    assert (row["stop_reason"], row["rejected_stop_reason"]) == ("eos", "length")


# -- a prompt that is there already --------------------------------------------------------------


@table("spelt", ["1+1", "<bos>1+1"])
def test_a_text_has_one_token_that_begins_it(spelt: str) -> None:
    tokenizer = dialect("gemma", None)
    rows, source = [SourceRow({"prompt": spelt}, "f, line 1")], SourceConfig(path="f.jsonl")
    examples = map_rows(rows, source, choose_columns(rows, source), name="f")
    (prompt,) = Renderer(tokenizer, DataConfig(train=())).prompts(examples)
    (row,) = demonstrations(tokenizer, {"prompt": spelt, "completion": "2"}, ())
    assert tokenizer.decode([*prompt.token_ids]) == "<bos>1+1"
    assert tokenizer.decode([*row.token_ids]) == "<bos>1+12<eos>"
    assert row.num_prompt_tokens == len(prompt.token_ids)


ALWAYS_OPENS = CHATML.replace(
    "<|im_start|>{{ m['role'] }}\n",
    "<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}<think>\n{% endif %}",
).replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")


@table(
    "template, settings",
    [
        (OPENS_THINKING, {}),
        (ALWAYS_OPENS, {}),
        (None, {"prompt_template": "{prompt}\n<think>\n"}),
    ],
)
def test_a_tag_that_the_prompt_opens_is_trained_once(
    template: str | None, settings: dict[str, Any]
) -> None:
    tokenizer = dialect("qwen", template)
    for said in ("<think>\nso\n</think>2", "so\n</think>2"):
        row = {"prompt": "1+1", "completion": said}
        assert trained(tokenizer, row, **settings) == "so\n</think>2<|im_end|>"


def test_a_template_that_closes_the_thought_it_has_opened_is_followed() -> None:
    """Of an answer without thoughts, as Qwen's thinking models have it: the line break of the
    prompt and those behind it are other tokens than all of them together."""
    closes = CHATML.replace("{{ m['content'] }}", "{{ thought(m) }}{{ m['content'] }}").replace(
        "{% for m", "{% macro thought(m) %}{% if m['role'] == 'assistant' %}<think>\n\n</think>\n\n"
        "{% endif %}{% endmacro %}{% for m"
    ).replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")  # fmt: skip
    tokenizer = dialect("qwen", closes)
    tokenizer.add_tokens(["\n\n"])
    assert trained(tokenizer, SUM) == "\n</think>\n\n2<|im_end|>"
