"""`hone generate`: what is kept, what a kill leaves, what goes on, what is read again, episodes."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

import psutil
import pytest
from tests.tiny_runs import lines

from hone.cli.main import main
from hone.data import blocks, reading
from hone.data.arithmetic import ALPHABET, generate, write_jsonl
from hone.data.chat import Renderer
from hone.loops import sampling
from hone.models.tiny import make_char_tokenizer, make_tiny_model
from hone.observe.resumable_jsonl import PartFileWriter, parts_folder
from hone.rollout.episodes import Episodes

FLAGS = (
    *("--model.path=model", "--run.device=cpu", "--data.train.0.path=rows.jsonl"),
    *("--data.chat=never", "--data.max_prompt_tokens=8", "--generation.max_completion_tokens=6"),
    *("--engine.max_num_seqs=8", "--n_samples_per_prompt=4", "--reward.num_workers=1"),
)
DIGITS = '--reward.functions=[{fn: "rewards.py:digits"}]'


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    make_tiny_model(
        folder / "model",
        tokenizer=make_char_tokenizer(ALPHABET),
        num_layers=1,
        hidden_size=32,
        max_position_embeddings=64,
    )
    rows = [row | {"level": n % 3} for n, row in enumerate(generate(40, 0))]
    write_jsonl(folder / "rows.jsonl", rows)
    (folder / "rewards.py").write_text(
        "def digits(completion):\n"
        "    return float(sum(letter.isdigit() for letter in completion))\n"
        "def fails(completion, answer):\n"
        "    if completion != answer and not completion[:1].isdigit(): raise ValueError('no')\n"
        "    return 1.0\n"
    )
    return folder


@pytest.fixture
def here(inputs, tmp_path, monkeypatch):
    shutil.copytree(inputs, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def made(*flags):
    """The rows that a run writes."""
    output = Path("completions.jsonl")
    for place in (output, Path("completions.jsonl.config.yaml")):
        place.unlink(missing_ok=True)
    assert main(["generate", *FLAGS, *flags]) == 0
    assert not parts_folder(output).exists()
    return lines(output)


def groups_of(rows):
    found = {}
    for row in rows:
        found.setdefault(row["prompt_id"], []).append(row)
    return found


def test_what_is_kept(here, caplog):
    caplog.set_level("INFO", logger="hone")
    every = groups_of(made(DIGITS))
    assert [len(group) for group in every.values()] == [4] * 40

    def total(row):
        return row["reward"]

    expected = {
        "best": [max(group, key=total) for group in every.values()],
        "passing": [row for group in every.values() for row in group if row["reward"] >= 3.0],
    }
    assert 0 < len(expected["passing"]) < 160
    for keep, rows in expected.items():
        flags = ["--pass_threshold=3"] if keep == "passing" else []
        assert made(DIGITS, f"--keep={keep}", *flags) == rows
    pairs = made(DIGITS, "--keep=pairs")
    both = [(max(group, key=total), min(group, key=total)) for group in every.values()]
    both = [(best, worst) for best, worst in both if best["reward"] > worst["reward"]]
    assert 0 < len(both) < 40
    assert [(row["chosen"], row["rejected"]) for row in pairs] == [
        (best["completion"], worst["completion"]) for best, worst in both
    ]
    assert all("completion" not in row for row in pairs)
    assert f"{len(pairs)} pairs written to completions.jsonl" in caplog.messages


def test_completions_that_cannot_be_scored_are_kept_by_all_alone(here, caplog):
    fails = '--reward.functions=[{fn: "rewards.py:fails"}]'
    rows = made(fails, "--reward.max_failure_rate=1")
    failed = [row for row in rows if row["reward"] is None]
    assert 0 < len(failed) < 160
    assert f"{len(failed):,} of them have no reward" in caplog.text
    scored = made(fails, "--reward.max_failure_rate=1", "--keep=passing")
    assert scored == [row for row in rows if row["reward"] is not None]


def test_too_many_failures_end_it_and_what_is_done_stays(here, capsys):
    rewards = here / "rewards.py"
    fails, text = '--reward.functions=[{fn: "rewards.py:fails"}]', rewards.read_text()
    assert main(["generate", *FLAGS, fails, "--reward.max_failure_rate=0.2"]) != 0
    told = " ".join(capsys.readouterr().err.split())
    assert "completions have no reward, more than the allowed 20% of all" in told
    assert "ValueError: no" in told
    assert not Path("completions.jsonl").exists()
    rewards.write_text(text.replace("raise ValueError('no')", "return 0.0"))
    assert main(["generate", *FLAGS, fails, "--reward.max_failure_rate=0.2"]) == 0
    rows = lines(Path("completions.jsonl"))
    assert [row["id"] for row in rows] == [f"{n}/{i}" for n in range(40) for i in range(4)]
    assert rows[-1]["reward"] is not None


def test_a_row_is_one_of_training_data(here):
    row = made(DIGITS, "--keep=best", "--data.prompt_template=={prompt}")[0]
    given = json.loads((here / "rows.jsonl").read_text().splitlines()[0])
    assert row["prompt"] == given["prompt"]
    assert row["rendered"] == f"={given['prompt']}"
    assert (row["answer"], row["level"]) == (given["answer"], given["level"])
    shutil.move("completions.jsonl", "best.jsonl")
    flags = ("--model.path=model", "--run.device=cpu", "--data.train.0.path=best.jsonl")
    flags = (*flags, "--data.chat=never", "--run.steps=2", "--data.examples_per_step=4")
    flags = (*flags, "--log.to=[]", "--trainer.logits_chunk_tokens=64")
    assert main(["sft", *flags, "--data.max_tokens=24", "--data.max_prompt_tokens=8"]) == 0


def start(*flags):
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "hone", "generate", *FLAGS, *flags],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_kills_lose_and_double_nothing(here):
    """Killed as soon as some more groups are done, so in the middle of others; and a line that is
    half written is cut off."""
    write_jsonl(here / "rows.jsonl", generate(600, 1, high=99))
    flags, output = (DIGITS, "--keep=passing", "--pass_threshold=3"), Path("completions.jsonl")
    expected = made(*flags)
    size = output.stat().st_size
    output.unlink()
    part = parts_folder(output) / "0-of-1.jsonl"
    chance, num_kills, done = random.Random(0), 0, 0
    while not output.exists():
        process, begun_s = start(*flags), monotonic()
        wanted = done + chance.randrange(size // 5, size // 3)
        while process.poll() is None and (not part.exists() or part.stat().st_size < wanted):
            assert monotonic() - begun_s < 600
            sleep(0.001)
        process.kill()
        _, told = process.communicate()
        assert process.returncode in (0, -9), told
        if part.exists():
            num_kills, done = num_kills + 1, part.stat().st_size
            with part.open("ab") as file:
                file.write(b'{"id": "7/0", "prompt": "ha')
    assert num_kills >= 2
    found = lines(output)
    for row, other in zip(found, expected, strict=True):
        # A product's last bits depend on how many rows it is computed with.
        assert row.pop("logprobs") == pytest.approx(other.pop("logprobs"), abs=1e-5)
    assert found == expected


ENVS = """
from hone.envs import Observation

class Echo:
    def __init__(self, last=3):
        self.last = last

    def step(self, episode):
        if len(episode.turns) == self.last or episode.turn[:1] in "02468":
            return sum(map(len, episode.turns)) / 10
        return Observation(f"={len(episode.turn)}=", role=None, max_tokens=2, state=[episode.turn])
"""
ECHO = ("--env.path=envs.py:Echo", "--generation.max_completion_tokens=20")


def test_episodes_are_those_of_an_evaluation(here, monkeypatch):
    """Token for token, with the same seeds, in another order of engine steps."""

    def same_seeds(**settings):
        return Episodes(**settings | {"purpose": "generate"})

    (here / "envs.py").write_text(ENVS)
    rows = made(*ECHO)
    assert {len(row["turns"]) for row in rows} == {1, 2, 3}
    assert all(row["reward_parts"] == {"env": row["reward"]} for row in rows)
    monkeypatch.setattr(sampling, "Episodes", same_seeds)
    replaced = {"train.0": "eval.0", "generation.": "eval.", "--n_samples": "--eval.n_samples"}
    flags = [*FLAGS, *ECHO, "--run.dir=run", "--engine.max_num_seqs=3"]
    for old, new in replaced.items():
        flags = [flag.replace(old, new) for flag in flags]
    assert main(["eval", *flags]) == 0
    evaluated = lines(Path("run/eval_samples.jsonl"))
    names = ("prompt_id", "index", "token_ids", "loss_mask", "turns", "reward", "stop_reason")
    assert [[row[name] for name in names] for row in rows] == [
        [row[name] for name in names] for row in evaluated
    ]
    assert all(
        row["logprobs"] == pytest.approx(other["logprobs"], abs=1e-5)
        for row, other in zip(rows, evaluated, strict=True)
    )


def test_episodes_go_on_where_they_were_ended(here, monkeypatch):
    """What was done stays; the prompts after it are played."""
    (here / "envs.py").write_text(ENVS)
    expected, append = made(*ECHO), PartFileWriter.append

    def dies(self, number, samples, rows, *, row):
        if number == 9:
            raise KeyboardInterrupt
        append(self, number, samples, rows, row=row)

    Path("completions.jsonl").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(PartFileWriter, "append", dies)
        with suppress(KeyboardInterrupt):
            main(["generate", *FLAGS, *ECHO])
    part = parts_folder(Path("completions.jsonl")) / "0-of-1.jsonl"
    assert len(lines(part)) == 9 * 4
    assert main(["generate", *FLAGS, *ECHO]) == 0
    found = lines(Path("completions.jsonl"))
    for row, other in zip(found, expected, strict=True):
        assert row.pop("logprobs") == pytest.approx(other.pop("logprobs"), abs=1e-5)
    assert found == expected


def test_runs_that_are_ended_anywhere_go_on_by_the_index(here, monkeypatch, caplog):
    """In the middle of blocks, with rows that are dropped and held out: each run renders the rows
    from the last prompt that was done, and all together write what an unbroken one does."""
    caplog.set_level("INFO", "hone")
    monkeypatch.setattr(blocks, "_BLOCK_BYTES", 200)
    monkeypatch.setattr(reading, "BLOCK_ROWS", 4)
    rows = [row | {"prompt": row["prompt"] * (1 + n % 3)} for n, row in enumerate(generate(90, 1))]
    Path("rows").mkdir()
    for number in range(3):
        write_jsonl(here / f"rows/{number}.jsonl", rows[number * 30 : number * 30 + 30])
    flags = ("--data.train.0.path=rows", "--data.eval_fraction=0.2", "--data.max_prompt_tokens=6")
    expected, append, prompts = made(*flags), PartFileWriter.append, Renderer.prompts
    row_of = [int(name.rpartition(":")[2]) for name in groups_of(expected)]
    assert 20 < len(row_of) < 60
    output, rendered = Path("completions.jsonl"), []
    output.unlink()

    def dies(self, number, samples, rows, *, row):
        assert row == row_of[number] - 1
        if number == end:
            raise KeyboardInterrupt
        append(self, number, samples, rows, row=row)

    def count(self, examples, **settings):
        rendered.extend(int(example.id.rpartition(":")[2]) for example in examples)
        return prompts(self, examples, **settings)

    monkeypatch.setattr(PartFileWriter, "append", dies)
    monkeypatch.setattr(Renderer, "prompts", count)
    before = 0
    for end in (0, 1, 2, 9, 17, len(row_of) - 1, -1):
        rendered.clear()
        with suppress(KeyboardInterrupt):
            main(["generate", *FLAGS, *flags])
        assert rendered[0] == (row_of[before - 1] if before else 1)
        if before:
            assert f"with row {row_of[before - 1]:,} of 90" in caplog.text
        before = end
    found = lines(output)
    for row, other in zip(found, expected, strict=True):
        assert row.pop("logprobs") == pytest.approx(other.pop("logprobs"), abs=1e-5)
    assert found == expected
    assert not parts_folder(output).exists()


def test_data_that_have_changed_are_not_gone_on_with(here, monkeypatch, capsys):
    """A shard, whose content the settings do not have. Before a prompt is done they may change."""
    Path("rows").mkdir()
    for number in range(3):
        write_jsonl(here / f"rows/{number}.jsonl", generate(10, number))
    flags, append = ("--data.train.0.path=rows",), PartFileWriter.append

    def dies(self, number, samples, rows, *, row):
        if number == end:
            raise KeyboardInterrupt
        append(self, number, samples, rows, row=row)

    monkeypatch.setattr(PartFileWriter, "append", dies)
    for end in (0, 12):
        write_jsonl(here / "rows/2.jsonl", generate(10, end))
        with suppress(KeyboardInterrupt):
            main(["generate", *FLAGS, *flags])
    parts = parts_folder(Path("completions.jsonl"))
    assert len(lines(parts / "0-of-1.jsonl")) == 12 * 4
    write_jsonl(here / "rows/2.jsonl", generate(10, 1))
    assert main(["generate", *FLAGS, *flags]) != 0
    told = " ".join(capsys.readouterr().err.split())
    assert "rows/2.jsonl has changed since it was indexed" in told
    assert len(lines(parts / "0-of-1.jsonl")) == 12 * 4


def test_an_environment_that_answers_nonsense_is_told_before_the_model_is_loaded(
    here, monkeypatch, capsys
):
    (here / "envs.py").write_text(ENVS.replace("sum(map(len, episode.turns)) / 10", "{'a': 1.0}"))
    monkeypatch.delattr(sampling, "load_engine")
    assert main(["generate", *FLAGS, *ECHO, "--env.args={last: 1}"]) != 0
    assert "without 'score'" in " ".join(capsys.readouterr().err.split())


def engines_of_this_process():
    children = psutil.Process().children()  # of other tests, too
    return [child for child in children if "hone.distributed.local" in child.cmdline()]


def kill_an_engine():
    """The oldest one, at whatever it is."""
    oldest = min(engines_of_this_process(), key=lambda one: one.create_time())
    os.kill(oldest.pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("devices_per_engine", [1, 2])
def test_who_samples_cannot_be_seen_in_what_is_written(
    here, monkeypatch, caplog, devices_per_engine
):
    """Two engines, of which one is killed in the middle; one engine of two devices, likewise."""
    caplog.set_level("INFO", "hone")
    (here / "envs.py").write_text(ENVS)
    expected, append = made(*ECHO), PartFileWriter.append

    def kills(self, number, samples, rows, *, row):
        append(self, number, samples, rows, row=row)
        if number == 9:
            kill_an_engine()

    monkeypatch.setattr(PartFileWriter, "append", kills)
    size = f"--engine.tensor_parallel_size={devices_per_engine}"
    found = made(*ECHO, "--nproc=2", size)
    assert "engine 0 is lost and replaced (restart 1 of at most 3)" in caplog.text
    assert "was killed by SIGKILL" in caplog.text
    for row, other in zip(found, expected, strict=True):
        # A product's last bits depend on how many rows it is computed with.
        assert row.pop("logprobs") == pytest.approx(other.pop("logprobs"), abs=1e-5)
    assert found == expected
    assert not engines_of_this_process()
