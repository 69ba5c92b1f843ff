"""Easiest rows first, and rows that rest: both against a slow walk over what has happened."""

from __future__ import annotations

import json
import logging
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.config.tree import PairsDataConfig, SFTDataConfig
from hone.data.curriculum import PassRates, column_numbers
from hone.data.hashing import keyed_hash
from hone.data.mixture import Mixture
from hone.data.order import Window
from hone.data.pairs import load_pairs
from hone.data.phases import Limits
from hone.data.prompts import load_prompts
from hone.data.row_source import Skipped, epoch_order
from hone.data.settings import ColumnsConfig, CurriculumConfig, DataConfig, SourceConfig
from hone.data.sft import load_sft
from hone.data.sources import SourceRow
from hone.data.stream import Stream
from hone.data.streamed import StreamedRows
from hone.errors import UserError
from hone.types import Prompt
from tests.data.support import char_tokenizer, write_rows
from tests.data.test_streamed import Rows
from tests.tables import table

TOKENIZER = char_tokenizer()


def ids(items) -> list[str]:
    return [item.id for item in items]


# --------------------------------------------------------------------------- easiest first


def prompts(num: int, name: str = "a") -> list[Prompt]:
    return [Prompt(id=f"{name}:{i + 1}", token_ids=(i,), text=f"{i}") for i in range(num)]


@settings(deadline=None)
@given(
    levels=st.lists(st.sampled_from([-1.5, 0.0, 2.0, 7.0]), min_size=1, max_size=20),
    seed=st.integers(0, 99),
    shuffle=st.booleans(),
)
def test_easier_rows_come_first_and_equal_ones_as_without_it(levels, seed, shuffle):
    rows = prompts(len(levels))
    known = {row.id: level for row, level in zip(rows, levels, strict=True)}
    stream = Stream([rows], seed=seed, shuffle=shuffle, column_values={"difficulty": known})
    for epoch in range(3):
        order = sorted(
            range(len(rows)),
            key=lambda i: (
                levels[i],
                keyed_hash("order", seed, epoch, rows[i].id) if shuffle else i,
            ),
        )
        assert ids(stream.take(len(rows))) == [rows[i].id for i in order]


def test_a_source_without_difficulties_keeps_its_order():
    known = {f"a:{i + 1}": float(-i) for i in range(5)}
    both = Stream([prompts(5), prompts(5, "b")], seed=3, column_values={"difficulty": known})
    plain = Stream([prompts(5), prompts(5, "b")], seed=3)
    taken, before = ids(both.take(10)), ids(plain.take(10))
    assert [x for x in taken if x[0] == "b"] == [x for x in before if x[0] == "b"]
    assert [x for x in taken if x[0] == "a"] == ["a:5", "a:4", "a:3", "a:2", "a:1"]


def test_other_difficulties_are_other_data():
    state = Stream(
        [prompts(2)], seed=3, column_values={"difficulty": {"a:1": 1.0, "a:2": 2.0}}
    ).state_dict()
    for other in ({"difficulty": {"a:1": 1.0, "a:2": 1.5}}, None):
        with pytest.raises(UserError, match="belongs to other data: fingerprint"):
            Stream([prompts(2)], seed=3, column_values=other).load_state_dict(state)


def rows(values: list[Any]) -> list[dict[str, Any]]:
    """Rows with sums, and with a level where there is one."""
    found = [{"prompt": f"{i}+1=", "answer": f"{i + 1}"} for i in range(len(values))]
    return [
        row if value == "none" else row | {"level": value}
        for row, value in zip(found, values, strict=True)
    ]


def source_of(path: Path, **settings: Any) -> SourceConfig:
    return SourceConfig(path=str(path), columns=ColumnsConfig(difficulty="level"), **settings)


@table("is_unpaired", [False, True])
def test_a_column_says_how_difficult_pairs_are(is_unpaired, tmp_path):
    rows = [
        {"prompt": f"q{i}", "chosen": "a", "rejected": "b" if i != 3 else "", "level": -(i // 2)}
        for i in range(8)
    ]
    cfg = PairsDataConfig.model_validate(
        {
            "train": [
                {
                    "path": write_rows(tmp_path / "a.jsonl", rows),
                    "columns": {"difficulty": "level"},
                }
            ],
            "missing_answers": "drop",
        }
    )
    data = load_pairs(cfg, TOKENIZER, seed=3, is_unpaired=is_unpaired)
    drawn = ids(data.train.take(len(data.train)))
    numbers = [int(row_id.split(":")[1]) for row_id in drawn]
    assert sorted(numbers) == sorted([1, 2, 3, 5, 6, 7, 8] * (2 if is_unpaired else 1))
    levels = [rows[number - 1]["level"] for number in numbers]
    assert levels == sorted(levels)


def test_a_column_says_how_difficult_rows_are(tmp_path):
    write_rows(tmp_path / "a.jsonl", rows([3, 1, 2.5, 1]))
    data = load_prompts(DataConfig(train=(source_of(tmp_path / "a.jsonl"),)), TOKENIZER, seed=0)
    taken = ids(data.train.take(8))
    for epoch in (taken[:4], taken[4:]):
        assert {*epoch[:2]} == {"a:2", "a:4"}
        assert epoch[2:] == ["a:3", "a:1"]


def test_demonstrations_have_an_order_too(tmp_path):
    found = [row | {"completion": row["answer"]} for row in rows([3, 1, 2])]
    write_rows(tmp_path / "a.jsonl", found)
    data = load_sft(SFTDataConfig(train=(source_of(tmp_path / "a.jsonl"),)), TOKENIZER, seed=0)
    assert ids(data.train.take(3)) == ["a:2", "a:3", "a:1"]


ROLE_NAMES = {"difficulty": "difficulty", "pass_rate": "pass rate"}


@table("role", ROLE_NAMES)
@table(
    "value, said",
    [
        ("hard", "'hard'"),
        ("3", "'3'"),
        (True, "True"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        ([1], r"\[1\]"),
        (None, "nothing in column 'level', which was to give the "),
        ("none", "nothing in column 'level', which was to give the "),
    ],
)
def test_what_is_no_number_is_refused_with_its_row(role, value, said, tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "a.jsonl"
    write_rows(path, rows([1, value]))
    source = SourceConfig(path=str(path), columns=ColumnsConfig(**{role: "level"}))
    with pytest.raises(UserError, match=rf"a\.jsonl, line 2: .*{said}") as error:
        load_prompts(DataConfig(train=(source,)), TOKENIZER, seed=0)
    assert ROLE_NAMES[role] in str(error.value)


def test_decimals_are_numbers():
    found = [SourceRow({"level": Decimal("1.5")}, "row 1"), SourceRow({"level": 2}, "row 2")]
    source = source_of(Path("a.parquet"))
    known = column_numbers(found, [6, 8], source, "a", "difficulty")
    assert known == {"a:7": 1.5, "a:9": 2.0}


def test_rows_that_are_left_out_need_no_number(tmp_path):
    """What the user's function leaves out is not looked at, and the others keep their numbers."""
    write_rows(tmp_path / "a.jsonl", rows([None, 5, 2, None, 3]))
    (tmp_path / "rules.py").write_text("def keep(row):\n    return row.get('level') is not None\n")
    source = SourceConfig(path=str(tmp_path / "a.jsonl"), columns=ColumnsConfig(difficulty="level"))
    cfg = DataConfig(train=(source,), filter=f"{tmp_path / 'rules.py'}:keep")
    assert ids(load_prompts(cfg, TOKENIZER, seed=0).train.take(6)) == ["a:3", "a:5", "a:2"] * 2


@settings(deadline=None)
@given(rates=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=40, max_size=40))
def test_rows_that_rest_count_for_the_epochs_of_a_source_with_a_limit(rates):
    """A source that is drawn at most twice ends after its second epoch, whatever rests in it."""
    limits = [Limits(), Limits(max_epochs=2)]
    stream = Stream([prompts(3, "a"), prompts(5, "b")], seed=2, limits=limits)
    stream.let_rest(CurriculumConfig(pass_rate=(0.0, 1.0), rest_epochs=1))
    drawn = []
    for step, rate in enumerate(rates, start=1):
        (row,) = stream.take(1, step=step)
        assert len(stream.peek(3, step=step)) == 3
        stream.learn(row.id, rate)
        drawn.append(row.id)
    ended = [row_id for row_id in drawn if row_id.startswith("b")]
    assert all(ended.count(row_id) <= 2 for row_id in ended)
    assert set(drawn[-10:]) <= {"a:1", "a:2", "a:3"}


def test_a_source_that_is_read_as_it_is_drawn_cannot_be_ordered(tmp_path):
    write_rows(tmp_path / "a.jsonl", rows([3, 1]))
    cfg = DataConfig(train=(source_of(tmp_path / "a.jsonl"),), shuffle_window=2)
    with pytest.raises(UserError, match=r"columns\.difficulty .*data\.shuffle false"):
        load_prompts(cfg, TOKENIZER, seed=0)
    source = SourceConfig(path=cfg.train[0].path, columns=ColumnsConfig(pass_rate="level"))
    with pytest.raises(UserError, match=r"columns\.pass_rate .*leave columns\.pass_rate unset"):
        load_prompts(DataConfig(train=(source,), shuffle_window=2), TOKENIZER, seed=0)


def test_a_column_says_which_rows_rest_before_they_are_drawn(tmp_path):
    write_rows(tmp_path / "a.jsonl", rows([0, 0.5, 1, 0.25, 0]))
    source = SourceConfig(path=str(tmp_path / "a.jsonl"), columns=ColumnsConfig(pass_rate="level"))
    cfg = DataConfig(train=(source,))
    for rest_epochs in (1, 3):
        curriculum = CurriculumConfig(pass_rate=(0, 1), rest_epochs=rest_epochs)
        stream = load_prompts(cfg, TOKENIZER, seed=0, curriculum=curriculum).train
        assert stream.counts == {"skipped_resting": 0, "resting": 3, "pass_rate": 0.35}
        lengths = {f"a:{n}": rest_of(n - 1, -1, rest_epochs) for n in (1, 3, 5)}
        for epoch in range(6):
            here = {"a:2", "a:4"} | {x for x, most in lengths.items() if epoch >= most}
            taken = ids(stream.take(len(here)))
            assert {*taken} == here
            for row_id in taken:
                stream.learn(row_id, 0.5)
    assert not load_prompts(cfg, TOKENIZER, seed=0).train.learns


# --------------------------------------------------------------------------- resting


SIZES = {"a": 7, "b": 4}
WINDOW = 3


def dropped(name: str, number: int) -> bool:
    return name == "b" and number == 2


def make(cfg: CurriculumConfig, *, streamed: bool, seed: int = 5) -> Stream:
    """A source of 7 rows and one of 4, of which a streamed one loses a row."""

    def prepare(name: str):
        def made(_, numbers):
            return [
                Skipped("too_long", f"row {n}") if dropped(name, n) else prompts(n + 1, name)[n]
                for n in numbers
            ]

        return made

    sources = [
        StreamedRows(
            Rows([2] * (num // 2) + [num % 2]),
            prepare(name),
            name=name,
            seed=seed,
            shuffle=True,
            window=Window(rows=num),
        )
        if streamed
        else prompts(num, name)
        for name, num in SIZES.items()
    ]
    stream = Stream(sources, seed=seed, weights=[2, 1])
    stream.let_rest(cfg)
    return stream


def rest_of(number: int, epoch: int, rest_epochs: int) -> int:
    """For how many epochs a row rests that was last drawn in `epoch`, by splitmix64."""
    value = (number * 0x9E3779B97F4A7C15 + (epoch + 1) * 0xD1B54A32D192ED03) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ (value >> shift)) * factor % 2**64
    return 1 + (value ^ (value >> 31)) % (2 * rest_epochs - 1)


class Walk:
    """What a stream with resting rows does, from the history of every row alone."""

    def __init__(self, cfg: CurriculumConfig, *, streamed: bool, seed: int = 5) -> None:
        self.cfg, self.streamed, self.seed = cfg, streamed, seed
        self.mixture = Mixture([2, 1])
        self.read, self.served = [0, 0], [0, 0]
        self.history: dict[str, list[tuple[str, float]]] = {}
        self.num_resting = 0

    def rests(self, row_id: str, epoch: int) -> bool:
        history = self.history.get(row_id, [])
        drawn = [value for what, value in history if what == "drawn"]
        rates = [value for what, value in history if what == "rate"]
        if not drawn or not rates:
            return False
        low, high = self.cfg.pass_rate
        is_outside = not low < rates[-1] < high
        number = int(row_id.split(":")[1]) - 1
        most = rest_of(number, int(drawn[-1]), self.cfg.rest_epochs)
        return is_outside and drawn[-1] < epoch <= drawn[-1] + most

    def draw(self) -> str:
        number = self.mixture.next_source(self.served)
        name, num = list(SIZES.items())[number]
        since = 0
        while True:
            epoch, place = divmod(self.read[number], num)
            names = [f"{name}:{i + 1}" for i in range(num)]
            row = epoch_order(names, seed=self.seed, epoch=epoch)[place]
            self.read[number] += 1
            since += 1
            if self.streamed and dropped(name, row):
                pass
            elif self.rests(names[row], epoch):
                self.num_resting += 1
            else:
                self.served[number] += 1
                self.history.setdefault(names[row], []).append(("drawn", epoch))
                return names[row]
            if since == 2 * num:  # all rest: forget when they were drawn
                since = 0
                for row_id in self.history.keys() & set(names):
                    self.history[row_id] = [x for x in self.history[row_id] if x[0] != "drawn"]

    def resting(self) -> int:
        epochs = {name: n // num for (name, num), n in zip(SIZES.items(), self.read, strict=True)}
        return sum(self.rests(row_id, epochs[row_id[0]]) for row_id in self.history)

    def last_rates(self) -> list[float]:
        found = []
        for history in self.history.values():
            found += [value for what, value in history if what == "rate"][-1:]
        return found


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(0, 9)),
        st.tuples(st.just("peek"), st.integers(1, 30)),
        st.tuples(st.just("score"), st.tuples(st.integers(0, 9), st.integers(0, 8))),
        st.tuples(st.just("all"), st.sampled_from([0, 4, 8])),
        st.tuples(st.just("resume"), st.none()),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(
    events=EVENTS,
    band=st.sampled_from([(0.0, 1.0), (0.1, 0.9), (0.375, 0.625)]),
    rest_epochs=st.sampled_from([1, 2, 3, 10**6]),
    streamed=st.booleans(),
)
def test_R18_rows_rest_as_a_walk_over_their_history_says(events, band, rest_epochs, streamed):
    cfg = CurriculumConfig(pass_rate=band, rest_epochs=rest_epochs)
    stream, walk = make(cfg, streamed=streamed), Walk(cfg, streamed=streamed)
    seen: list[str] = []
    for event, value in events:
        if event == "take":
            taken = ids(stream.take(value))
            assert taken == [walk.draw() for _ in range(value)]
            seen += taken
        elif event == "peek":
            before = json.dumps(stream.state_dict())
            ahead = ids(stream.peek(value))
            assert json.dumps(stream.state_dict()) == before
            again = make(cfg, streamed=streamed)
            again.load_state_dict(json.loads(before))
            assert ids(again.take(value)) == ahead
        elif event == "resume":
            state = json.dumps(stream.state_dict())
            stream = make(cfg, streamed=streamed)
            stream.load_state_dict(json.loads(state))
            assert json.dumps(stream.state_dict()) == state
        elif seen:
            scored = [(seen[-1 - value[0] % len(seen)], value[1] / 8)] if event == "score" else []
            scored = scored or [(row_id, value / 8) for row_id in dict.fromkeys(seen)]
            for row_id, rate in scored:
                stream.learn(row_id, rate)
                walk.history[row_id].append(("rate", rate))
        counts = stream.counts
        assert counts["skipped_resting"] == walk.num_resting
        assert counts["resting"] == walk.resting()
        if rates := walk.last_rates():
            assert counts["pass_rate"] == pytest.approx(sum(rates) / len(rates))
        else:
            assert "pass_rate" not in counts


def test_a_prompt_rests_once_and_is_tried_again():
    """The rule on a page: three rows, of which one is always solved and one never."""
    stream = Stream([prompts(3)], seed=0)
    stream.let_rest(CurriculumConfig(pass_rate=(0, 1), rest_epochs=1))
    rates = {"a:1": 1.0, "a:2": 0.5, "a:3": 0.0}
    drawn: list[str] = []
    for _ in range(4):  # the epochs have 3, 1, 3 and 1 rows
        for _ in range(3 if len(drawn) in (0, 4) else 1):
            (row,) = stream.take(1)
            stream.learn(row.id, rates[row.id])
            drawn.append(row.id)
    assert [sorted(drawn[:3]), drawn[3], sorted(drawn[4:7]), drawn[7]] == [
        ["a:1", "a:2", "a:3"],
        "a:2",
        ["a:1", "a:2", "a:3"],
        "a:2",
    ]
    assert stream.counts["resting"] == 2
    assert stream.counts["pass_rate"] == 0.5


def test_where_all_rest_they_are_drawn_all_the_same_and_this_is_said_once(caplog):
    stream = Stream([prompts(5)], seed=0, names=["sums"])
    stream.let_rest(CurriculumConfig(pass_rate=(0.1, 0.9), rest_epochs=10**6))
    drawn: list[str] = []
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            drawn += ids(stream.take(5))
            for row_id in drawn[-5:]:
                stream.learn(row_id, 1.0)
    assert [sorted(drawn[i : i + 5]) for i in range(0, 20, 5)] == [ids(prompts(5))] * 4
    assert [r.message for r in caplog.records if "all prompts rest" in r.message] == [
        "sums: all prompts rest, by data.curriculum, so they are drawn all the same (this is "
        "said once)"
    ]


def test_a_source_that_rests_until_it_ends_gives_no_row(caplog):
    """By rates from before the run; it is no source of which filters leave nothing."""
    known = {row.id: 1.0 for row in prompts(5)}
    stream = Stream(
        [prompts(5), prompts(5, "b")],
        seed=0,
        names=["a", "b"],
        limits=[Limits(max_epochs=1), Limits()],
        column_values={"pass_rate": known},
    )
    stream.let_rest(CurriculumConfig(pass_rate=(0, 1), rest_epochs=10**6))
    with caplog.at_level(logging.WARNING):
        assert {row_id[0] for row_id in ids(stream.take(20))} == {"b"}
        state = stream.state_dict()
        stream.load_state_dict(json.loads(json.dumps(state)))
        assert {row_id[0] for row_id in ids(stream.take(20))} == {"b"}
    assert stream.counts["skipped_resting"] == 5
    assert [record.message for record in caplog.records] == [
        "a: all its prompts rest, by columns.pass_rate, until it ends (max_epochs 1), so it gives "
        "no row"
    ]


def test_a_rate_that_equals_a_bound_is_outside():
    for bound in (0.1, 0.3, 0.7, 0.9):
        rates = PassRates(1, CurriculumConfig(pass_rate=(bound, 1)))
        rates.drawn(0, 0)
        rates.scored(0, bound)
        assert rates.rests(0, 1)


def test_settings_may_change_when_a_run_goes_on():
    stream = Stream([prompts(4)], seed=0)
    plain = stream.state_dict()
    stream.let_rest(CurriculumConfig(pass_rate=(0, 1)))
    stream.load_state_dict(plain)  # of a run without a curriculum
    for row_id in ids(stream.take(4)):
        stream.learn(row_id, 0.25)
    wider = Stream([prompts(4)], seed=0)
    wider.let_rest(CurriculumConfig(pass_rate=(0.5, 1)))
    wider.load_state_dict(stream.state_dict())
    assert wider.counts["resting"] == 4
    without = Stream([prompts(4)], seed=0)
    without.load_state_dict(stream.state_dict())
    assert without.counts == {}
    assert ids(without.take(4)) == ids(Stream([prompts(4)], seed=0).take(8)[4:])


def test_an_unknown_prompt_is_a_mistake():
    stream = make(CurriculumConfig(pass_rate=(0, 1)), streamed=True)
    for row_id in ("a:0", "a:8", "c:1", "a:x", "a"):
        with pytest.raises(KeyError):
            stream.learn(row_id, 1.0)


def test_the_table_of_a_million_rows_is_small():
    rates = PassRates(3_000_000, CurriculumConfig(pass_rate=(0, 1)))
    numbers = np.random.default_rng(0).choice(3_000_000, 1_000_000, replace=False)
    rates._drawn[numbers] = 3
    rates._rates[numbers] = numbers % 9 / 8
    text = json.dumps(rates.state_dict())
    assert len(text) < 17_000_000
    again = PassRates(3_000_000, CurriculumConfig(pass_rate=(0, 1)))
    again.load_state_dict(json.loads(text))
    resting = int(np.isin(numbers % 9, (0, 8)).sum())
    assert again.num_resting(3) == rates.num_resting(3) == resting
    # As many come back in each of the next 9 epochs.
    left = [again.num_resting(epoch) / resting for epoch in range(3, 13)]
    assert left == pytest.approx([1 - i / 9 for i in range(10)], abs=0.01)
