"""Runs of `hone dpo`: whole, resumed, with adapters, by two processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.loops.test_processes import assert_same_run, run_hone
from tests.tables import check_rows
from tests.tiny_runs import right_and_backwards

from hone.config.tree import DPOConfig
from hone.data.arithmetic import write_jsonl
from hone.errors import UserError
from hone.loops import supervised
from hone.trainer.frozen import FrozenScorer


@pytest.fixture
def make_dpo(inputs: Path, tmp_path: Path) -> Any:
    pairs = tmp_path / "pairs.jsonl"
    write_jsonl(pairs, right_and_backwards())

    def make(name: str, **sections: Any) -> DPOConfig:
        fields: dict[str, Any] = {
            "run": {"dir": tmp_path / name, "steps": 4, "device": "cpu"},
            "model": {"path": str(inputs / "model")},
            "data": {
                "train": [{"path": str(pairs)}],
                "eval_fraction": 0.25,
                "chat": "never",
                "max_tokens": 16,
                "examples_per_step": 7,
            },
            "trainer": {"optimizer": {"lr": 3e-3}, "logits_chunk_tokens": 64},
            "eval": {"every_n_steps": 2},
            "checkpoint": {"every_n_steps": 2},
            "log": {"to": []},
        }
        for section, values in sections.items():
            fields[section] = fields.get(section, {}) | values
        return DPOConfig.model_validate(fields)

    return make


def metrics(cfg: DPOConfig) -> list[dict[str, float]]:
    text = (cfg.run.dir / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def same_weights(*cfgs: DPOConfig) -> bool:
    one, two = (load_file(cfg.run.dir / "model" / "model.safetensors") for cfg in cfgs)
    return all(tensor.equal(two[name]) for name, tensor in one.items())


@pytest.mark.parametrize(
    "loss", ["sigmoid", "kto", "orpo", {"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.0}]
)
def test_preferences_are_learnt(loss: Any, make_dpo: Any) -> None:
    cfg = make_dpo("run", algorithm={"loss": loss}, run={"steps": 12}, eval={"every_n_steps": 12})
    supervised.run(cfg)
    rows = metrics(cfg)
    if loss == "kto":
        assert "kl" in rows[0]
    else:
        assert rows[-1]["eval/rewards/accuracies"] > 0.5
    assert rows[-1]["rewards/margins"] > rows[0]["rewards/margins"]
    assert rows[-1]["train/loss"] < rows[0]["train/loss"]


def test_a_resumed_run_is_the_same_bit_by_bit(make_dpo: Any) -> None:
    whole, parted = make_dpo("whole"), make_dpo("parted", run={"steps": 2})
    supervised.run(whole)
    supervised.run(parted)
    supervised.run(make_dpo("parted"))
    assert same_weights(whole, parted)


def test_single_completions_of_pairs_are_drawn_from_a_streamed_source(make_dpo: Any) -> None:
    """The same run as with a source that is read whole, also where it goes on."""
    streamed = {"shuffle_window": 500, "max_eval_rows": 500}
    settings: dict[str, Any] = {"algorithm": {"loss": "kto"}}
    whole = make_dpo("whole", **settings)
    supervised.run(whole)
    for steps in (1, 3, 4):
        cfg = make_dpo("parted", data=streamed, run={"steps": steps}, **settings)
        supervised.run(cfg)
    assert same_weights(whole, cfg)
    assert metrics(cfg)[-1]["data/rows_read"] >= 28
    assert metrics(cfg)[-1]["eval/loss"] == pytest.approx(metrics(whole)[-1]["eval/loss"])


def test_without_adapters_is_the_reference_of_a_run_that_trains_them(make_dpo: Any) -> None:
    cfg = make_dpo("lora", model={"lora": {"rank": 4}})
    supervised.run(cfg)
    rows = metrics(cfg)
    assert rows[0]["rewards/margins"] == pytest.approx(0, abs=1e-6)
    assert rows[-1]["rewards/margins"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["sigmoid", "kto"])
def test_R24_two_processes_train_the_same(loss: str, make_dpo: Any, tmp_path: Path) -> None:
    one, two = (make_dpo(name, algorithm={"loss": loss}) for name in ("one", "two"))
    supervised.run(one)
    run_hone("dpo", two, tmp_path, "--nproc", "2", "--trainer.parallel.zero_stage", "3")
    for cfg in (one, two):
        (cfg.run.dir / "samples.jsonl").write_text("")
    assert_same_run(one.run.dir, two.run.dir)


class TestReferenceCache:
    """What the reference says of the rows, scored before the first step and kept."""

    def test_it_changes_nothing_but_where_the_scores_come_from(
        self, make_dpo: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO")
        kept = {"algorithm": {"reference_cache": tmp_path / "kept"}}
        live, first, again = make_dpo("live"), make_dpo("first", **kept), make_dpo("again", **kept)
        supervised.run(live)
        supervised.run(first)
        assert "146 rows scored by the reference, and kept in" in caplog.text
        (file,) = (tmp_path / "kept").iterdir()
        written = file.stat().st_mtime_ns
        supervised.run(again)
        assert "logprobs of 146 rows by the reference read from " in caplog.text
        assert file.stat().st_mtime_ns == written
        assert same_weights(first, again)
        for one, two in zip(metrics(live), metrics(first), strict=True):
            for name in ("train/loss", "rewards/margins", "eval/rewards/margins"):
                assert one.get(name) == pytest.approx(two.get(name), abs=1e-5)

    def test_a_resumed_run_is_the_same_bit_by_bit(self, make_dpo: Any, tmp_path: Path) -> None:
        """Also where the file has gone: the start, not what was trained, is scored again."""
        kept = {"algorithm": {"reference_cache": tmp_path / "kept"}}
        whole = make_dpo("whole", **kept)
        supervised.run(whole)
        supervised.run(make_dpo("parted", run={"steps": 2}, **kept))
        (file,) = (tmp_path / "kept").iterdir()
        file.unlink()
        parted = make_dpo("parted", **kept)
        supervised.run(parted)
        assert file.exists()
        assert same_weights(whole, parted)

    def test_anything_else_has_a_file_of_its_own(self, make_dpo: Any, tmp_path: Path) -> None:
        kept = {"algorithm": {"reference_cache": tmp_path / "kept"}, "run": {"steps": 1}}
        supervised.run(make_dpo("one", **kept))
        changes = {
            "other weights": {"model": {"init": "random"}},
            "another format": {"model": {"dtype": "bfloat16"}},
            "other rows": {"data": {"prompt_template": "{prompt}0"}},
            "adapters": {"model": {"lora": {"rank": 2}}},
            "the same rows": {"data": {"max_tokens": 15}},  # leaves none out
        }

        def check(changed: dict[str, Any]) -> None:
            before = {*(tmp_path / "kept").iterdir()}
            supervised.run(make_dpo(f"run {len(before)}", **kept, **changed))
            added = {*(tmp_path / "kept").iterdir()} - before
            assert len(added) == (changed != changes["the same rows"])

        check_rows(changes, check)

    def test_no_model_is_held(self, make_dpo: Any, tmp_path: Path) -> None:
        assert make_dpo("live").has_frozen_reference
        cfg = make_dpo("kept", algorithm={"reference_cache": tmp_path})
        assert not cfg.has_frozen_reference
        cfg = make_dpo("kto", algorithm={"reference_cache": tmp_path, "loss": "kto"})
        assert cfg.has_frozen_reference  # its completions of other prompts are no rows of the data

    def test_a_source_that_is_streamed_is_refused_with_what_to_change(
        self, make_dpo: Any, tmp_path: Path
    ) -> None:
        cache = {"reference_cache": tmp_path / "kept"}
        cfg = make_dpo("run", algorithm=cache, data={"shuffle_window": 20})
        told = r"pairs is read as rows are drawn: leave data.shuffle_window unset, give it fewer"
        with pytest.raises(UserError, match=told):
            supervised.run(cfg)

    def test_a_damaged_file_is_named(self, make_dpo: Any, tmp_path: Path) -> None:
        kept = {"algorithm": {"reference_cache": tmp_path / "kept"}, "run": {"steps": 1}}
        supervised.run(make_dpo("one", **kept))
        (file,) = (tmp_path / "kept").iterdir()
        file.write_bytes(file.read_bytes()[:-8])
        with pytest.raises(UserError, match=f"cannot read {file}.*remove it"):
            supervised.run(make_dpo("two", **kept))


@pytest.mark.parametrize(("loss", "passes"), [("sigmoid", 1), ("kto", 1), ("orpo", 0)])
def test_held_out_rows_are_scored_by_the_reference_once(
    loss: str, passes: int, make_dpo: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored: list[int] = []
    begin = FrozenScorer.begin

    def counted(self: FrozenScorer, rows: Any, outputs: Any) -> Any:
        scored.append(len(rows))
        return begin(self, rows, outputs)

    monkeypatch.setattr(FrozenScorer, "begin", counted)
    cfg = make_dpo("run", algorithm={"loss": loss}, eval={"every_n_steps": 1})
    supervised.run(cfg)
    steps = 4 if passes else 0
    assert len(scored) == steps + passes
    assert len({json.dumps(row["eval/loss"]) for row in metrics(cfg)}) == 4
