"""From sources to a run's data: filter, split, mix, resume."""

import json
import logging
import re
from collections import Counter

import pytest

from hone.config.tree import PairsDataConfig, SFTDataConfig
from hone.data import loading
from hone.data.chat import Rendered
from hone.data.pairs import load_pairs
from hone.data.prompts import load_prompts
from hone.data.reading import PromptReader
from hone.data.settings import ColumnsConfig, DataConfig, PairSourceConfig, SourceConfig
from hone.data.sft import load_sft
from hone.data.split import is_held_out
from hone.errors import UserError
from tests.data.support import CHATML, SHORTENS_HISTORY, char_tokenizer, write_rows

TOKENIZER = char_tokenizer()


def rows(num: int, letter: str = "p", length: int = 5) -> list[dict]:
    return [{"prompt": letter * length, "answer": str(i), "kind": i % 2} for i in range(num)]


def distinct(num: int) -> list[dict]:
    return [{"prompt": f"{i}+1=", "answer": f"{i + 1}"} for i in range(num)]


def source(folder, name: str, data: list[dict], **settings) -> SourceConfig:
    return SourceConfig(path=write_rows(folder / f"{name}.jsonl", data), **settings)


def load(*sources, seed=0, tokenizer=TOKENIZER, max_prompt_tokens=None, **settings):
    cfg = DataConfig(train=sources, **settings)
    return load_prompts(cfg, tokenizer, seed=seed, max_prompt_tokens=max_prompt_tokens)


def test_a_prompt_carries_its_row(tmp_path):
    data = load(source(tmp_path, "math", rows(3)), shuffle=False)
    first, second, _ = data.train.take(3)
    assert (first.id, second.id) == ("math:1", "math:2")
    assert (second.answer, second.task, second.unrendered) == ("1", "math", "ppppp")
    assert second.metadata == {"prompt": "ppppp", "answer": "1", "kind": 1}
    assert second.text == "ppppp"
    assert list(second.token_ids) == TOKENIZER("ppppp")["input_ids"]
    assert data.eval == []


# --------------------------------------------------------------------------- length


def test_long_prompts_are_dropped_and_listed(tmp_path, caplog):
    data = rows(4) + rows(2, length=20) + rows(1, length=9)
    with caplog.at_level(logging.WARNING):
        loaded = load(source(tmp_path, "a", data), max_prompt_tokens=10)
    report = loaded.report
    assert (report.num_rows, report.num_kept, report.longest_tokens) == (7, 5, 10)
    assert [(row.id, row.num_tokens) for row in report.dropped] == [("a:5", 21), ("a:6", 21)]
    assert report.dropped[0].limit == "the context's room for a prompt = 10"
    assert "5 of 7 rows kept, longest 10 tokens; dropped as too long: " in caplog.text
    assert "a.jsonl, line 5 (21); " in caplog.text
    assert len(loaded.train) == 5


@pytest.mark.parametrize("chat", ["auto", "never"])
def test_a_chat_template_that_nobody_asked_for_is_told(chat, tmp_path, caplog):
    tokenizer = char_tokenizer(CHATML)
    with caplog.at_level(logging.INFO):
        load(source(tmp_path, "a", rows(2)), tokenizer=tokenizer, chat=chat)
    told = "put into the tokenizer's chat template (with data.chat=never they stay as they are)"
    assert (told in caplog.text) == (chat == "auto")
    assert ("the first one: '<|im_start|>user" in caplog.text) == (chat == "auto")


def test_prompts_that_are_read_as_they_are_needed_show_the_first_once(tmp_path, caplog):
    """`hone generate` has no list of them."""
    cfg = DataConfig(train=(source(tmp_path, "a", rows(2)), source(tmp_path, "b", rows(2))))
    with caplog.at_level(logging.INFO):
        reader = PromptReader(cfg, char_tokenizer(CHATML), seed=0, max_prompt_tokens=400)
        found = [prompt for _, prompt in reader.read()]
    assert len(found) == 4
    assert caplog.text.count(f"the first one: {found[0].text!r}"[:40]) == 1


def test_how_many_rows_are_for_what_is_told(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    held_out = source(tmp_path, "b", rows(3))
    load(source(tmp_path, "a", rows(1_200)), eval=(held_out,))
    assert "a.jsonl: 1,200 rows, prompt from" in caplog.text
    assert "b.jsonl: 3 rows, prompt from" in caplog.text
    assert "1,203 of 1,203 rows kept (1,200 to train on, 3 held out), longest" in caplog.text
    caplog.clear()
    load(source(tmp_path, "a", rows(1_200)), eval=(held_out,), shuffle_window=1_000)
    assert "3 of 3 rows kept for evaluation, longest" in caplog.text


def test_rows_held_out_of_a_large_file_are_none_of_those_of_a_small_one(
    tmp_path, caplog, monkeypatch
):
    """The large one is read as its rows are drawn, so only the small one's are counted."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(loading, "WHOLE_ROWS", 100)
    small = source(tmp_path, "b", distinct(40))
    large = source(tmp_path, "a", distinct(1_240)[40:])
    data = load(large, small, eval_fraction=0.2)
    found = re.search(r"40 of 40 rows kept \((\d+) to train on, (\d+) held out\)", caplog.text)
    assert found, caplog.text
    assert sum(map(int, found.groups())) == 40
    assert int(found[2]) < 40 < len(data.eval)


def test_the_lower_limit_counts(tmp_path):
    a = source(tmp_path, "a", rows(2) + rows(1, length=20))
    assert len(load(a, max_prompt_tokens=10).train) == 2
    cfg = DataConfig(train=(a,), max_prompt_tokens=10)
    report = load_prompts(cfg, TOKENIZER, seed=0, max_prompt_tokens=400).report
    assert report.dropped[0].limit == "data.max_prompt_tokens = 10"


def test_long_prompts_may_be_errors(tmp_path):
    a = source(tmp_path, "a", rows(2) + rows(1, length=20))
    with pytest.raises(UserError, match=r"a.jsonl, line 3: 21 tokens, but .*room .* = 10; raise"):
        load(a, max_prompt_tokens=10, overlong_prompts="error")


def test_nothing_left_is_an_error_for_each_source(tmp_path):
    a, b = source(tmp_path, "a", rows(3)), source(tmp_path, "b", rows(3, length=20))
    with pytest.raises(
        UserError, match=r"all 3 rows are too long; .*b.jsonl, line 1, has 21 tokens, but .* = 10"
    ):
        load(a, b, max_prompt_tokens=10)


def test_the_template_counts_towards_the_length(tmp_path):
    a = source(tmp_path, "a", rows(1))
    num_tokens = len(load(a, tokenizer=char_tokenizer(CHATML)).train.take(1)[0].token_ids)
    assert num_tokens > 6
    with pytest.raises(UserError, match="all 1 rows"):
        load(a, tokenizer=char_tokenizer(CHATML), max_prompt_tokens=num_tokens - 1)


# --------------------------------------------------------------------------- split


def ids(prompts) -> set[str]:
    return {prompt.id for prompt in prompts}


def test_split_is_disjoint_complete_and_of_the_asked_size(tmp_path):
    data = load(source(tmp_path, "a", distinct(2000)), eval_fraction=0.1)
    train = ids(data.train.take(len(data.train)))
    assert not train & ids(data.eval)
    assert len(train | ids(data.eval)) == 2000
    assert abs(len(data.eval) - 200) < 67  # 5 standard deviations


def test_split_of_a_prompt_that_is_there_once_depends_on_seed_and_id_alone(tmp_path):
    alone = load(source(tmp_path, "a", distinct(300)), eval_fraction=0.2)
    cut = load(source(tmp_path, "a", distinct(300), max_rows=150), eval_fraction=0.2)
    mixed = load(
        source(tmp_path, "b", rows(50)),
        source(tmp_path, "a", distinct(300)),
        eval_fraction=0.2,
        shuffle=False,
    )
    other = load(source(tmp_path, "a", distinct(300)), eval_fraction=0.2, seed=1)
    assert ids(cut.eval) == {i for i in ids(alone.eval) if int(i.split(":")[1]) <= 150}
    assert {i for i in ids(mixed.eval) if i.startswith("a:")} == ids(alone.eval)
    assert ids(other.eval) != ids(alone.eval)
    more = load(source(tmp_path, "a", distinct(300)), eval_fraction=0.4)
    assert ids(alone.eval) < ids(more.eval)
    train = alone.train.first_rows()
    for prompt in (*train, *alone.eval):
        row = Rendered(prompt.text, prompt.token_ids)
        assert is_held_out(row, seed=0, fraction=0.2) == (prompt.id in ids(alone.eval))
        assert not is_held_out(row, seed=0, fraction=0.0)


REPEATED = [{"prompt": f"{i % 40}+1=", "answer": f"{i}"} for i in range(400)]


def check_no_prompt_is_on_both_sides(train, evaluation) -> None:
    """No prompt is on both sides, and each is there with all its ten rows."""
    asked, held_out = Counter(map(tuple, train)), Counter(map(tuple, evaluation))
    assert set((asked + held_out).values()) == {10}
    assert asked
    assert held_out
    assert not asked.keys() & held_out.keys()


def test_rows_that_repeat_a_prompt_stay_together(tmp_path):
    """Also over sources, and in what is read as it is needed."""
    sources = source(tmp_path, "a", REPEATED[:130]), source(tmp_path, "b", REPEATED[130:])
    data = load(*sources, eval_fraction=0.2)
    train = data.train.first_rows()
    check_no_prompt_is_on_both_sides((p.token_ids for p in train), (p.token_ids for p in data.eval))
    cfg = DataConfig(train=sources, eval_fraction=0.2)
    found = PromptReader(cfg, TOKENIZER, seed=0, max_prompt_tokens=400).read()
    assert ids(prompt for _, prompt in found) == ids(train)


@pytest.mark.parametrize("max_tokens", [100, 20])
def test_demonstrations_of_a_prompt_stay_together(tmp_path, max_tokens):
    """A prompt goes where it goes for `hone rl`, also where its first row is dropped."""
    data = [{**row, "completion": "c" * (5 if i >= 40 else 50)} for i, row in enumerate(REPEATED)]
    loaded = load_demonstrations(tmp_path, data, eval_fraction=0.2, max_tokens=max_tokens)
    num_kept = 400 if max_tokens == 100 else 360
    assert len(loaded.train) + len(loaded.eval) == num_kept
    prompts = load(source(tmp_path, "a", data), eval_fraction=0.2)
    assert ids(loaded.eval) == {i for i in ids(prompts.eval) if int(i[2:]) > 400 - num_kept}
    sides = ids(loaded.train.first_rows()), ids(loaded.eval)
    train, held_out = ({REPEATED[int(i[2:]) - 1]["prompt"] for i in side} for side in sides)
    assert len(train) + len(held_out) == 40
    assert not train & held_out


@pytest.mark.parametrize("kind", ["pairs", "a reward model's", "as single completions"])
def test_preferences_of_a_prompt_stay_together(tmp_path, kind):
    """Also the two completions of one pair, and where a template writes the prompt anew once an
    answer follows."""
    data = [{**row, "chosen": f"{i}", "rejected": f"-{i}"} for i, row in enumerate(REPEATED)]
    path = write_rows(tmp_path / "p.jsonl", data)
    loaded = load_pairs(
        PairsDataConfig(train=(PairSourceConfig(path=path),), eval_fraction=0.2),
        char_tokenizer(SHORTENS_HISTORY),
        seed=0,
        is_unpaired=kind == "as single completions",
        for_reward_model=kind == "a reward model's",
    )
    train = ids(loaded.train.take(len(loaded.train)))

    def asked(names) -> list[str]:
        rows = [int(name.split(":")[1]) - 1 for name in names if not name.endswith("rejected")]
        return [REPEATED[row]["prompt"] for row in rows]

    check_no_prompt_is_on_both_sides(asked(train), asked(ids(loaded.eval)))
    if kind == "as single completions":
        assert {name.rpartition(":")[0] for name in train}.isdisjoint(
            name.rpartition(":")[0] for name in ids(loaded.eval)
        )


def test_named_evaluation_sources_are_used_whole_and_in_order(tmp_path):
    test = source(tmp_path, "test", rows(5))
    data = load(source(tmp_path, "train", rows(5)), eval=(test,), eval_fraction=0.5)
    assert [prompt.id for prompt in data.eval] == [f"test:{i}" for i in range(1, 6)]
    assert len(data.train) == 5


def test_splits_that_leave_nothing_are_errors(tmp_path):
    a = source(tmp_path, "a", rows(2))
    with pytest.raises(UserError, match=r"= 0.999999 leaves none of the 2 rows of .*a.jsonl"):
        load(a, eval_fraction=0.999999)
    with pytest.raises(UserError, match=r"= 1e-06 holds out none of 2 rows"):
        load(a, eval_fraction=1e-6)
    with pytest.raises(UserError, match=r"Rows of a prompt stay together, .* 1 prompts in all"):
        load(a, eval_fraction=1e-6)
    with pytest.raises(UserError, match="no data: name at least one source"):
        load()


def test_evaluation_alone_needs_no_training_data(tmp_path):
    data = load(eval=(source(tmp_path, "a", rows(2)),))
    assert len(data.eval) == 2
    with pytest.raises(UserError, match=r"name a data set in `data.train`"):
        data.train.take(1)


# --------------------------------------------------------------------------- mixing, state


def test_sources_mix_by_weight_and_keep_apart(tmp_path):
    (tmp_path / "other").mkdir()
    data = load(
        source(tmp_path, "a", rows(10), weight=3, task="easy"),
        source(tmp_path / "other", "a", rows(50), weight=1, columns=ColumnsConfig(task="kind")),
    )
    taken = data.train.take(40)
    assert Counter(prompt.id.split(":")[0] for prompt in taken) == {"a": 30, "a~2": 10}
    assert {p.task for p in taken if p.id.startswith("a:")} == {"easy"}
    assert {p.task for p in taken if p.id.startswith("a~2:")} <= {"0", "1"}


def test_resume_from_disk_goes_on(tmp_path):
    sources = [source(tmp_path, "a", rows(30)), source(tmp_path, "b", rows(20), weight=2)]
    whole = [prompt.id for prompt in load(*sources).train.take(100)]
    begun = load(*sources).train
    head = [prompt.id for prompt in begun.take(37)]
    state = json.loads(json.dumps(begun.state_dict()))
    resumed = load(*sources).train
    resumed.load_state_dict(state)
    assert head + [prompt.id for prompt in resumed.take(63)] == whole


@pytest.mark.parametrize("changed", ["prompt", "answer"])
def test_state_is_refused_after_the_file_has_changed(tmp_path, changed):
    state = load(source(tmp_path, "a", rows(5))).train.state_dict()
    data = rows(5)
    data[3][changed] = "other"
    with pytest.raises(UserError, match="belongs to other data: fingerprint was"):
        load(source(tmp_path, "a", data)).train.load_state_dict(state)


# --------------------------------------------------------------------------- demonstrations


def load_demonstrations(folder, data, **settings):
    cfg = SFTDataConfig(train=(source(folder, "a", data),), **settings)
    return load_sft(cfg, TOKENIZER, seed=0)


def test_demonstrations_obey_both_limits(tmp_path):
    data = [
        {"prompt": "p" * num_prompt, "completion": "c" * num_completion}
        for num_prompt, num_completion in [(5, 5), (20, 1), (5, 40), (9, 19)]
    ]
    loaded = load_demonstrations(tmp_path, data, max_prompt_tokens=10, max_tokens=30)
    assert ids(loaded.train.take(2)) == {"a:1", "a:4"}
    assert [(row.num_tokens, row.limit) for row in loaded.report.dropped] == [
        (21, "data.max_prompt_tokens = 10"),
        (47, "data.max_tokens = 30"),
    ]
    assert loaded.report.longest_tokens == 30
    with pytest.raises(UserError, match=r"line 2: 21 tokens, but data.max_prompt_tokens = 10"):
        load_demonstrations(tmp_path, data, max_prompt_tokens=10, overlong_prompts="error")


def test_demonstrations_are_held_out_and_resumed_like_prompts(tmp_path):
    data = [{"prompt": f"{i}+1=", "completion": f"{i + 1}"} for i in range(100)]
    loaded = load_demonstrations(tmp_path, data, eval_fraction=0.2)
    prompts = load(source(tmp_path, "a", data), eval_fraction=0.2)
    assert ids(loaded.eval) == ids(prompts.eval)
    whole = [row.id for row in loaded.train.take(100)]
    again = load_demonstrations(tmp_path, data, eval_fraction=0.2).train
    again.take(60)
    state = json.loads(json.dumps(again.state_dict()))
    resumed = load_demonstrations(tmp_path, data, eval_fraction=0.2).train
    resumed.load_state_dict(state)
    assert [row.id for row in resumed.take(40)] == whole[60:]
