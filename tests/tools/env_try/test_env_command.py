"""`hone env`: what is played is what training plays, and what would be refused is said."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from hone.cli import env as command
from hone.cli.main import main
from hone.errors import UserError
from hone.models.tiny import make_bpe_tokenizer, make_tiny_model
from hone.models.tiny_vision import make_tiny_vision_model
from hone.observe.episode_rows import read_turns
from hone.rollout.requests import request_seed
from hone.tools.env_try.policy import Script, completion_of, typed_line
from hone.types import Request, SamplingParams, StopReason

ENVS = """
import random
import time
from pathlib import Path

from hone.envs import Observation


class Guess:
    def __init__(self, high=100):
        self.high = high

    def start(self, row):
        self.number = random.Random(row.seed).randrange(self.high)
        return f" Guess my number below {self.high}."

    def step(self, action):
        said = action.text.strip()
        if not said.isdigit():
            message = {"role": "tool", "name": "judge", "content": "a number!"}
            return Observation([message], reward=-0.5)
        if int(said) == self.number:
            return {"score": 1.0, "turns": action.index + 1}
        return "Lower." if int(said) > self.number else "Higher."

    def finish(self):
        return 0.25


class Stateless:
    def step(self, episode):
        return None if len(episode.turns) == 2 else f"said {episode.turn}"


def length(turns):
    return float(len(turns[-1]))


class Unseeded(Guess):
    def start(self, row):
        super().start(row)
        return f"{random.SystemRandom().random()}"


class Raises(Guess):
    def step(self, action):
        raise ConnectionError("the server answered 503")


class Lost(Guess):
    def __init__(self, folder):
        super().__init__()
        self.file = Path(folder) / "attempts"

    def start(self, row):
        self.attempt = len(self.file.read_text()) if self.file.exists() else 0
        self.file.write_text("x" * (self.attempt + 1))
        return super().start(row)

    def step(self, action):
        if self.attempt == 0 and action.index == 1:
            raise ConnectionError("the server answered 502")
        return 1.0 if action.index == 2 else "go on"


class Slow(Guess):
    def start(self, row):
        time.sleep(600)


class Verbose(Guess):
    def start(self, row):
        return "word " * 5000


class Strange(Guess):
    def step(self, action):
        return [{"role": "critic", "content": "no"}]


class Shows:
    def start(self, row):
        from PIL import Image

        self.parts = [
            {"type": "text", "text": "look: "},
            {"type": "image", "image": Image.new("RGB", (40, 30))},
        ]
        return self.parts

    def step(self, action):
        return 1.0 if action.index == 1 else self.parts
"""
STRICT = (
    "{% for message in messages %}{% if message['role'] not in ['user', 'assistant', 'tool'] %}"
    "{{ raise_exception('no such role') }}{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("env")
    (folder / "envs.py").write_text(ENVS)
    tokenizer = make_bpe_tokenizer(["Guess my number. Higher. Lower."], 280)
    tokenizer.chat_template = STRICT
    make_tiny_model(
        folder / "model",
        tokenizer=tokenizer,
        hidden_size=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        intermediate_size=64,
        max_position_embeddings=1024,
    )
    rows = [{"prompt": f"Game {n}.", "answer": f"{n}"} for n in range(5)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "mine.yaml").write_text(
        f"model: {{path: {folder / 'model'}}}\n"
        f"data: {{train: [{{path: {folder / 'rows.jsonl'}}}]}}\n"
        f"env: {{path: '{folder / 'envs.py'}:Guess', max_turns: 4}}\n"
        "rollout: {max_completion_tokens: 300, prompts_per_step: 4, n_samples_per_prompt: 4}\n"
        "trainer: {max_tokens_per_microbatch: 512}\n"
    )
    return folder


def number_of(row: str, high: int = 100) -> int:
    """The number that the environment draws in the first episode of a row."""
    seed = request_seed(0, "rollout", 0, row, -1)
    return random.Random(seed).randrange(high)


def written(folder: Path, tmp_path: Path, script: Any, *argv: str, code: int = 0) -> list[Any]:
    """The rows that `hone env try` writes of a script."""
    (tmp_path / "script.json").write_text(json.dumps(script))
    file = tmp_path / "episodes.jsonl"
    words = ["env", "try", str(folder / "mine.yaml"), *argv]
    assert main([*words, "--script", str(tmp_path / "script.json"), "--json", str(file)]) == code
    return [json.loads(line) for line in file.open()]


def test_episodes_are_those_of_training(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The environment gets the seed that a run gives it, and the tokens are those of the whole
    conversation, rendered by the tokenizer itself."""
    numbers = [number_of("rows:1"), number_of("rows:2")]
    script = {"rows:1": ["what?", f"{numbers[0]}"], "rows:2": ["100", "0", "1000", "1"]}
    first, second = written(folder, tmp_path, script, "--rows", "2")
    assert (first["reward"], first["reward_parts"]["env/turns"]) == (0.5, 2.0)
    assert second["stop_reason"] == "max_turns"
    assert second["reward"] == 0.25, "`finish` has scored it"

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    messages = [
        {"role": "user", "content": "Game 0. Guess my number below 100."},
        {"role": "assistant", "content": "what?"},
        {"role": "tool", "name": "judge", "content": "a number!"},
        {"role": "assistant", "content": f"{numbers[0]}"},
    ]
    whole = tokenizer.apply_chat_template(messages, tokenize=False).removesuffix("\n")
    ids = first["prompt_token_ids"] + first["token_ids"]
    assert ids == tokenizer(whole, add_special_tokens=False)["input_ids"]
    turns = read_turns(first)
    assert turns is not None
    assert [turn.text for turn in turns] == ["what?", f"{numbers[0]}"]
    assert [(said.role, said.name, said.text) for said in turns[0].observed] == [
        ("tool", "judge", "a number!")
    ]
    assert all(turn.policy_s is not None and turn.env_s is not None for turn in turns)

    shown = capsys.readouterr().out
    for text in ("row rows:1", "judge", "a number!", "reward -0.5", "reward 0.5", "tokens"):
        assert text in shown
    assert "<|im_start|>" not in shown


def test_images_are_named_by_their_sizes(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tiny_vision_model(tmp_path / "model", family="qwen3_vl")
    (tmp_path / "turns.json").write_text('["a", "b"]')
    shows = f"{folder / 'envs.py'}:Shows"
    recipe, model = str(folder / "mine.yaml"), str(tmp_path / "model")
    with_model = [recipe, "--env.path", shows, "--model.path", model]
    for words in ([shows], with_model):
        script = ["--script", str(tmp_path / "turns.json"), "--rows", "1"]
        assert main(["env", "try", *words, *script]) == 0
        assert capsys.readouterr().out.count("look: [image of 40 x 30 pixels]") == 2
        assert main(["env", "check", *words]) == 0
        assert capsys.readouterr().out.count("look: [image of 40 x 30 pixels]") == 2
    assert main(["env", "check", recipe, "--env.path", shows]) == 1
    assert "the model reads text alone" in " ".join(capsys.readouterr().out.split())


def test_raw_shows_what_goes_before_a_turn(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(folder, tmp_path, ["100", "x"], "--rows=1", "--raw", "--turns", "2")
    shown = capsys.readouterr().out
    assert "<|im_start|>user" in shown
    assert "Lower.<|im_end|>" in shown


def test_an_environment_alone_is_played_without_a_model(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "script.json").write_text('["one", "two"]')
    path, reward = (f"{folder / 'envs.py'}:{name}" for name in ("Stateless", "length"))
    flags = ["--rows", "1", f"--reward.functions.0.fn={reward}", "--script"]
    assert main(["env", "try", path, *flags, str(tmp_path / "script.json")]) == 0
    shown = capsys.readouterr().out
    assert "said one" in shown
    assert "reward 3  (length 3)" in shown, "the environment left it to a function"
    assert "row row:1" in shown
    assert "tokens:" not in shown


def test_a_script_that_is_too_short_ends_the_episode_and_the_command_says_so(
    folder: Path, tmp_path: Path
) -> None:
    (row,) = written(folder, tmp_path, ["100"], "--rows", "1", code=1)
    assert row["failure"] == "engine"
    assert "nothing is given" in row["failure_detail"]


def test_an_episode_that_is_played_again_says_why(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [f"--env.path={folder / 'envs.py'}:Lost", f"--env.args.folder={tmp_path}"]
    (row,) = written(folder, tmp_path, ["a", "b", "c"], "--rows=1", *flags)
    assert (row["reward"], row["attempt"], len(row["turns"])) == (1.0, 1, 3)
    shown = " ".join(capsys.readouterr().out.split())
    assert "the server answered 502" in shown
    assert shown.count("policy 1 a") == 2
    assert "attempt 2" in shown


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("[1]", "must hold a list of texts"),
        ('{"rows:1": "a"}', "must hold a list of texts"),
        ("[", "no JSON"),
        ('{"other": ["a"]}', "has no turns for the rows rows:1"),
    ],
)
def test_scripts_that_are_none_are_refused(
    folder: Path, tmp_path: Path, script: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "script.json").write_text(script)
    words = ["env", "try", str(folder / "mine.yaml"), "--rows", "1"]
    assert main([*words, "--script", str(tmp_path / "script.json")]) == 2
    assert problem in capsys.readouterr().err


def test_without_a_script_somebody_must_be_there_to_type(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["env", "try", str(folder / "mine.yaml"), "--rows", "1", "--turns", "2"]
    monkeypatch.setattr(command.sys.stdin, "isatty", lambda: False, raising=False)
    assert main(words) == 2
    assert "no terminal to type at" in capsys.readouterr().err
    lines = iter(["1\\", "00", "7"])
    monkeypatch.setattr(command.sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda mark: next(lines))
    assert main(words) == 0
    assert "a number!" in capsys.readouterr().out, "two lines were one turn"


def test_a_typed_turn_ends_with_the_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(mark: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", ends)
    assert typed_line("> ") is None


def test_a_scripted_turn_ends_where_a_sampled_one_would() -> None:
    def completion(text: str, **sampling: Any) -> tuple[list[int], StopReason]:
        request = Request(
            id="a/0", prompt_ids=(), sampling=SamplingParams(**({"max_tokens": 9} | sampling))
        )
        found = completion_of(request, text, lambda said: [*said.encode()], 0)
        return list(found.token_ids), found.stop_reason

    assert completion("ab") == ([97, 98, 0], StopReason.EOS)
    assert completion("abc", max_tokens=3) == ([97, 98, 99], StopReason.LENGTH)
    assert completion("abcab", stop=("z", "b")) == ([97, 98], StopReason.STOP_STRING)


def test_a_list_is_for_all_rows_and_an_object_for_each() -> None:
    assert Script(["a"], "").text("x", 0) == "a"
    assert Script(["a"], "").text("x", 1) is None
    assert Script({"x": ["b"]}, "").text("x", 0) == "b"


CHECKS = {
    "Guess": (0, "a live object for each episode", ["errors: 0, warnings: 0", "Guess my number"]),
    "Stateless": (0, "stateless", ["errors: 0, warnings: 0", "said 0"]),
    "Unseeded": (0, "a live object", ["start differently", "random.Random(row.seed)"]),
    "Raises": (1, "a live object", ["the server answered 503", "env.retries"]),
    "Slow": (1, "a live object", ["killed after 1 s", "env.turn_timeout_s"]),
    "Verbose": (1, "a live object", ["leave room for a completion", "say less"]),
    "Strange": (1, "a live object", ["no such role", "model.chat_template"]),
    "Missing": (1, "unknown", ["has no environment 'Missing'"]),
}


@pytest.mark.parametrize("name", CHECKS)
def test_check_says_what_a_run_would_refuse(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, kind, texts = CHECKS[name]
    words = ["env", "check", str(folder / "mine.yaml"), "--env.turn_timeout_s=1"]
    assert main([*words, f"--env.path={folder / 'envs.py'}:{name}"]) == code
    shown = " ".join(capsys.readouterr().out.split())
    for text in (kind, *texts):
        assert text in shown


def test_what_is_wrong_with_the_words(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(folder / "mine.yaml")
    script = tmp_path / "script.json"
    script.write_text("[]")
    cases = {
        ("play",): "takes try or check, got 'play'",
        ("try", recipe, "--rows", "0"): "--rows takes a whole number",
        ("try", recipe, "--script", "nowhere.json"): "no such file",
        ("try", recipe, "--json", str(script)): "exists",
        ("try", recipe, "--env.max_turn", "3"): "max_turns",
        ("try", "--script", str(script)): "neither env.path nor env.tools is set",
        ("check",): "neither env.path nor env.tools is set",
        ("check", "--env.harness.command=ls"): "a program that plays episodes by itself has no",
    }
    for words, problem in cases.items():
        assert main(["env", *words]) == 2, words
        assert problem in capsys.readouterr().err, words


def test_a_tokenizer_that_is_not_here_is_said(folder: Path, tmp_path: Path) -> None:
    words = [f"--env.path={folder / 'envs.py'}:Stateless", "--model.path=./nowhere"]
    language = command._language(command._config(words), 1)
    assert not language.has_tokens
    assert "without a chat template and tokens, since" in language.note
    with pytest.raises(UserError, match="no such file"):
        command._language(command._config([*words, "--data.train.0.path=none.jsonl"]), 1)
