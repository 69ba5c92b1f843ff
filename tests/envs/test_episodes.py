"""Runs in environments of several turns, against episodes that are driven by hand, turn by turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hone.config.tree import RLConfig
from hone.loops import reinforce
from hone.loops.inputs import prompts_of
from hone.loops.launch import plan_run
from hone.loops.workers import make_engine
from hone.models.load import load_model
from hone.models.support import declared_eos_ids
from hone.models.tokenizer import decoder, load_tokenizer
from hone.observe.episode_rows import read_turns
from hone.rollout.episodes import Episodes
from hone.rollout.requests import Decode, request_seed, sampling_params
from hone.trainer.trainer import Trainer
from hone.types import NOT_SAMPLED, Completion, Engine, Request, Sample
from tests.tiny_runs import lines, tiny_config, write_inputs

ENVS = '''
import time

from hone.envs import Observation


class Echo:
    """Two to four turns, or `first` to `last` of them: says how long a turn was, until one begins
    with an even digit."""

    def __init__(self, first=2, last=4):
        self.first, self.last = first, last

    def step(self, episode):
        number = len(episode.turns)
        even = sum(c in "02468" for c in episode.turn) / 3
        if number >= self.first and (number == self.last or episode.turn[:1] in "02468"):
            return even
        said = f"={len(episode.turn)}="
        state = [*(episode.state or []), said]
        assert len(state) == number
        return Observation(said, role=None, reward=even, max_tokens=3, state=state)


class Endless:
    def step(self, episode):
        return "=" * 2


class Slow:
    async def step(self, episode):
        if len(episode.turns) == 2 and episode.seed % 2:
            time.sleep(60)
        return 1.0 if len(episode.turns) == 2 else Observation("+", role=None, max_tokens=2)


class Wrong:
    def step(self, episode):
        return {"reward": 1.0}
'''
LONGEST = 48
AHEAD: dict[str, Any] = {"max_staleness": 2}
TIS: dict[str, Any] = {"correction": {"kind": "tis"}}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("envs")
    write_inputs(folder)
    (folder / "envs.py").write_text(ENVS)
    return folder


@pytest.fixture(scope="module")
def decode(inputs: Path) -> Decode:
    tokenizer = load_tokenizer(tiny_config(inputs, inputs / "none").model)
    return decoder(tokenizer, declared_eos_ids(tokenizer))


def configured(inputs: Path, folder: Path, name: str = "Echo", **sections: Any) -> RLConfig:
    names = {"log": {"to": [], "samples_per_step": 999}} | sections
    rollout = {"prompts_per_step": 4, "n_samples_per_prompt": 4, "max_completion_tokens": LONGEST}
    names["rollout"] = rollout | names.get("rollout", {})
    names["env"] = {"path": f"{inputs / 'envs.py'}:{name}"} | names.get("env", {})
    names["reward"] = {"functions": [], "num_workers": 2} | names.get("reward", {})
    return tiny_config(inputs, folder, **names)


def run(cfg: RLConfig) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Metrics and samples."""
    reinforce.run(cfg)
    return lines(cfg.run.dir / "metrics.jsonl"), lines(cfg.run.dir / "samples.jsonl")


def finished(engine: Engine) -> Completion:
    while engine.has_unfinished:
        for completion in engine.step():
            return completion
    raise AssertionError


def by_hand(cfg: RLConfig, sample: Mapping[str, Any], number: int) -> Sample:
    """One episode of `Echo`, alone in an engine of its own, a turn at a time."""
    tokenizer = load_tokenizer(cfg.model)
    prompts = {prompt.id: prompt for prompt in prompts_of(cfg, tokenizer).known_rows()}
    prompt, index = prompts[sample["prompt_id"]], sample["index"]
    model = load_model(cfg.model, device=torch.device("cpu"), seed=cfg.run.seed)
    plan = plan_run(cfg, "cpu", world_size=1)
    engine = make_engine(plan, model, tokenizer, owns_weights=True, device=torch.device("cpu"))
    first = Request(
        id=sample["id"],
        prompt_ids=prompt.token_ids,
        sampling=replace(
            sampling_params(cfg.rollout, ()),
            seed=request_seed(cfg.run.seed, "rollout", number, prompt.id, index),
        ),
    )
    decode = decoder(tokenizer, declared_eos_ids(tokenizer))
    ids, mask, logprobs, request = [], [], [], first
    for turn in range(4):
        engine.submit([request])
        drawn = finished(engine)
        ids += drawn.token_ids
        logprobs += drawn.logprobs
        mask += [1] * len(drawn.token_ids)
        text = decode(drawn.token_ids)
        if (turn > 0 and (turn == 3 or text[:1] in "02468")) or len(ids) >= LONGEST:
            break
        said = tokenizer(f"={len(text)}=", add_special_tokens=False)["input_ids"]
        if len(ids) + len(said) >= LONGEST:
            break
        ids += said
        mask += [0] * len(said)
        logprobs += [0.0] * len(said)
        request = replace(
            first,
            prompt_ids=(*prompt.token_ids, *ids),
            sampling=replace(
                first.sampling,
                max_tokens=min(3, LONGEST - len(ids)),
                seed=request_seed(first.sampling.seed, "turn", turn + 1, "", 0),
            ),
        )
    return Sample(
        id=first.id,
        prompt=prompt,
        index=index,
        token_ids=ids,
        logprobs=logprobs,
        weight_versions=[],
        loss_mask=[bool(value) for value in mask],
        stop_reason=drawn.stop_reason,
    )


def check_sample(sample: Mapping[str, Any], decode: Decode) -> None:
    """What holds of every episode of `Echo`."""
    ids, mask, versions = (sample[key] for key in ("token_ids", "loss_mask", "weight_versions"))
    assert len(ids) == len(mask) == len(versions) == len(sample["logprobs"]) <= LONGEST
    sampled = [False] * len(ids)
    for turn in sample["turns"]:
        sampled[turn["start"] : turn["end"]] = [True] * (turn["end"] - turn["start"])
    assert [version != NOT_SAMPLED for version in versions] == sampled
    assert [bool(value) for value in mask] == sampled
    assert all(sample["logprobs"][t] == 0.0 for t, drawn in enumerate(sampled) if not drawn)
    for before, after in zip(sample["turns"], sample["turns"][1:], strict=False):
        turn, said = ids[before["start"] : before["end"]], ids[before["end"] : after["start"]]
        assert decode(said) == f"={len(decode(turn))}="


def test_an_episode_is_that_of_turns_driven_by_hand(
    inputs: Path, tmp_path: Path, decode: Decode
) -> None:
    cfg = configured(inputs, tmp_path / "run", run={"dir": tmp_path / "run", "steps": 1})
    (row,), samples = run(cfg)
    assert Counter(len(sample["turns"]) for sample in samples).keys() >= {2, 3, 4}
    for sample in samples:
        check_sample(sample, decode)
    for sample in samples[::3]:
        expected = by_hand(cfg, sample, int(sample["id"].partition("-")[2].partition("/")[0]))
        assert sample["token_ids"] == expected.token_ids
        assert [bool(value) for value in sample["loss_mask"]] == expected.loss_mask
        assert sample["logprobs"] == pytest.approx(expected.logprobs, abs=1e-5)
    # The trainer finds the engine's log-probabilities again, and trains what was sampled alone.
    assert row["off_policy/parity/kl"] < 1e-6
    assert row["train/num_tokens"] == sum(sum(sample["loss_mask"]) for sample in samples)
    assert row["rollout/turns/mean"] > 2
    inserted = [sample["loss_mask"].count(0) for sample in samples]
    assert row["rollout/observation_tokens/max"] == max(inserted)


def test_an_observation_that_is_trained_is_seen(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted bug: what the environment said enters the loss."""
    go_on = Episodes.next_request

    def trained(
        self: Episodes, sample: Sample, first: Request, *, max_tokens: int
    ) -> Request | None:
        found = go_on(self, sample, first, max_tokens=max_tokens)
        sample.loss_mask = [True] * len(sample.loss_mask)
        return found

    monkeypatch.setattr(Episodes, "next_request", trained)
    cfg = configured(
        inputs, tmp_path, run={"dir": tmp_path / "run", "steps": 1}, trainer={"parity": "off"}
    )
    (row,), samples = run(cfg)
    sampled = sum(v != NOT_SAMPLED for sample in samples for v in sample["weight_versions"])
    assert row["train/num_tokens"] > sampled


@pytest.mark.parametrize(
    "sections",
    [
        {"rollout": {"oversample_prompts": 3}},
        {"pipeline": AHEAD, "algorithm": TIS},
        {"pipeline": AHEAD | {"in_flight": "abort"}, "algorithm": TIS},
        {"pipeline": AHEAD | {"in_flight": "finish"}, "algorithm": TIS},
        {"cluster": {"num_engines": 2}},
        {"rollout": {"dynamic_sampling": True}},
    ],
    ids=["carried over", "pause", "abort", "finish", "two engines", "dynamic"],
)
def test_episodes_are_whole_however_they_are_interrupted(
    inputs: Path, tmp_path: Path, decode: Decode, sections: dict[str, Any]
) -> None:
    """Through an evaluation and a second launch that goes on."""
    steps: Sequence[int] = (3, 5)
    for last in steps:
        cfg = configured(
            inputs,
            tmp_path / "run",
            run={"dir": tmp_path / "run", "steps": last},
            eval={"every_n_steps": 2, "max_completion_tokens": 12},
            checkpoint={"every_n_steps": 1},
            **sections,
        )
        rows, samples = run(cfg)
    assert [row["step"] for row in rows] == list(range(1, 6))
    for sample in samples:
        check_sample(sample, decode)
    trained = Counter(s["prompt_id"] for s in samples if s["split"] == "train")
    if "dynamic_sampling" not in sections.get("rollout", {}):
        assert set(trained.values()) == {4}
    assert all(sample["failure"] is None for sample in samples)
    for row in rows:
        of_step = [s for s in samples if (s["step"], s["split"]) == (row["step"], "train")]
        assert row["train/num_tokens"] == sum(sum(s["loss_mask"]) for s in of_step)


def test_a_killed_run_that_goes_on_is_the_straight_one(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ended and unfinished episodes, with the state of their environment, are in the checkpoint.
    Rows equal in all but times, also of episodes whose first turn was the last."""

    def to_step(name: str, last: int) -> list[dict[str, Any]]:
        cfg = configured(
            inputs,
            tmp_path / name,
            run={"dir": tmp_path / name, "steps": last},
            rollout={"oversample_prompts": 3},
            checkpoint={"every_n_steps": 2},
            env={"args": {"first": 1}},
        )
        return run(cfg)[1]

    class Killed(BaseException):
        pass

    update, num_updates = Trainer.update, count(1)

    def killed(self: Trainer, *given: Any) -> Mapping[str, Any]:
        if next(num_updates) == 3:
            raise Killed
        return update(self, *given)

    straight = to_step("straight", 4)
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "update", killed)
        with pytest.raises(Killed):
            to_step("resumed", 4)
    assert to_step("resumed", 4) == straight
    carried = [row for row in straight if row["step"] == 3 and max(row["weight_versions"]) < 2]
    assert {1, 2} <= {len(row["turns"]) for row in carried}
    assert all(read_turns(row) is not None for row in straight)
    assert any(len(set(row["weight_versions"]) - {NOT_SAMPLED}) > 1 for row in straight)
    names = ("straight", "resumed")
    one, other = (load_file(tmp_path / name / "model" / "model.safetensors") for name in names)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_last_turn_is_the_limits(inputs: Path, tmp_path: Path) -> None:
    """What an endless environment says last is dropped, and the episode counts as truncated."""
    cfg = configured(
        inputs,
        tmp_path / "run",
        "Endless",
        run={"dir": tmp_path / "run", "steps": 1},
        env={"max_turns": 3},
        rollout={"stop": ["1", "2", "3", "4", "5", "6", "7", "8", "9", "0"]},
    )
    (_, samples) = run(cfg)
    for sample in samples:
        at_length = sample["stop_reason"] == "length"
        assert at_length or sample["stop_reason"] == "max_turns"
        assert len(sample["turns"]) <= 3
        assert at_length or len(sample["turns"]) == 3
        assert sample["reward"] == 0.0
        assert sample["token_ids"][-1:] == sample["token_ids"][sample["turns"][-1]["end"] - 1 :]


def test_a_turn_that_is_not_answered_in_time_fails_its_sample_alone(
    inputs: Path, tmp_path: Path
) -> None:
    cfg = configured(
        inputs,
        tmp_path / "run",
        "Slow",
        run={"dir": tmp_path / "run", "steps": 1},
        reward={"timeout_s": 2.0, "max_failure_rate": 1.0, "num_workers": 4},
    )
    (row,), samples = run(cfg)
    failed = [sample["failure"] for sample in samples]
    assert set(failed) == {None, "timeout"}
    assert len(failed) == 16
    assert row["train/num_tokens"] == sum(
        sum(s["loss_mask"]) for s in samples if s["failure"] is None
    )


def test_an_environment_that_answers_nonsense_is_told_before_the_model_is_loaded(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(reinforce, "load_for_training")
    with pytest.raises(ValueError, match=r"env: .*without 'score'"):
        reinforce.run(configured(inputs, tmp_path / "run", "Wrong"))
