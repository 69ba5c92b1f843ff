"""Episodes that programs play, over a scripted engine."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from hone.rewards.scorer import FailureRateError
from hone.types import NOT_SAMPLED, FailureKind, Sample, StopReason
from tests.door.served import logprob_of, tokenizer_of, until
from tests.harness.played import SAMPLING, Played, finish, group_of, played

TWO_TURNS = """
messages = [*TASK["messages"]]
for turn in range(2):
    answer = chat(messages)
    messages += [said(answer), {"role": "user", "content": f"and {turn}"}]
print("no score")
print(0.25)
print()
"""


def log_of(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


LOGGED = """
def log(**fields):
    with open(LOG, "a") as file:
        file.write(json.dumps(fields) + "\\n")
"""


def logging_to(folder: Path, program: str) -> str:
    return f"LOG = {str(folder / 'log.jsonl')!r}\n{LOGGED}\n{program}"


def turns_of(played: Played, sample: Sample) -> list[tuple[int, ...]]:
    """What the engine got for each turn of a sample: the prompts of the requests, found by their
    answers."""
    return [
        sample.prompt.token_ids + tuple(sample.token_ids[: turn.start]) for turn in sample.turns
    ]


def test_the_sample_has_what_the_program_was_sent(tmp_path: Path) -> None:
    program = logging_to(
        tmp_path,
        TWO_TURNS.replace("answer = chat(messages)", "answer = chat(messages); log(answer=answer)"),
    )
    with played(tmp_path, program) as game:
        samples = game.play(*(group_of(game.episodes, group_id=f"1-{n}", number=n) for n in (0, 1)))
        requests = {request.prompt_ids: [] for request in game.engine.submitted}
        for request in game.engine.submitted:
            requests[request.prompt_ids].append(request)
    assert len(samples) == 4
    answers = [entry["answer"] for entry in log_of(tmp_path)]
    assert len(answers) == 8
    for sample in samples:
        assert sample.failure is None, sample.failure_detail
        assert sample.reward is not None
        assert sample.reward.total == 0.25
        assert [turn.observed != "" for turn in sample.turns] == [True, False]
        assert sample.stop_reason is StopReason.EOS
        assert not sample.branches
        for turn in sample.turns:
            ids = [*sample.token_ids[turn.start : turn.end]]
            logprobs = [*sample.logprobs[turn.start : turn.end]]
            assert all(sample.loss_mask[turn.start : turn.end])
            (answer,) = (
                a
                for a in answers
                if a["choices"][0]["token_ids"] == ids
                and [c["logprob"] for c in a["choices"][0]["logprobs"]["content"]] == logprobs
            )
            assert answer["prompt_token_ids"] == [
                *sample.prompt.token_ids,
                *sample.token_ids[: turn.start],
            ]
            (request,) = (
                r
                for r in requests[tuple(answer["prompt_token_ids"])]
                if [logprob_of(r, place) for place in range(len(ids))] == logprobs
            )
            assert request.sampling.temperature == SAMPLING.temperature
        given = [n for n, mask in enumerate(sample.loss_mask) if not mask]
        assert {sample.logprobs[n] for n in given} == {0.0}
        assert {sample.weight_versions[n] for n in given} == {NOT_SAMPLED}
    seeds = Counter(request.sampling.seed for request in game.engine.submitted)
    assert max(seeds.values()) == 1


def test_the_same_seed_plays_the_same_episodes(tmp_path: Path) -> None:
    """Also where requests ask for seeds, which would make the samples of a group equal."""
    program = TWO_TURNS.replace("chat(messages)", "chat(messages, seed=1)")
    runs: list[list[list[int]]] = []
    for _ in range(2):
        with played(tmp_path, program) as game:
            samples = game.play(group_of(game.episodes, indices=range(3)))
            runs.append([[*sample.token_ids] for sample in samples])
    assert runs[0] == runs[1]
    assert len({tuple(ids) for ids in runs[0]}) == 3


def test_functions_score_what_the_program_does_not(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(
        "def score(completion, answer, kept):\n"
        "    assert answer == 'world' and kept == 7\n"
        "    return float(len(completion))\n"
    )
    functions = [{"fn": f"{tmp_path / 'rewards.py'}:score"}]
    with played(tmp_path, TWO_TURNS.replace("print(0.25)", ""), functions=functions) as game:
        (sample,) = game.play(group_of(game.episodes, indices=[0], kept=7))
    assert sample.failure is None, sample.failure_detail
    assert sample.reward is not None
    assert sample.reward.total == len(sample.text)
    assert sample.text.count("answer") == 2


def test_episodes_without_a_score_are_compared(tmp_path: Path) -> None:
    """A function of whole groups gets all of them at once; one with a score is none of them."""
    (tmp_path / "rewards.py").write_text(
        "def rank(completions, **columns):\n"
        "    lengths = sorted(set(map(len, completions)))\n"
        "    return [100 * len(completions) + lengths.index(len(c)) for c in completions]\n"
    )
    functions = [{"fn": f"{tmp_path / 'rewards.py'}:rank", "whole_groups": True}]
    program = TWO_TURNS.replace(
        "print(0.25)",
        'last = answer["choices"][0]["message"]["content"]\n'
        'print(-1.5 if int(last.split()[-1]) % 3 == 0 else "none")',
    )
    with played(tmp_path, program, functions=functions) as game:
        samples = game.play(group_of(game.episodes, indices=range(6)))
    scored = [s for s in samples if int(s.turns[-1].text.split()[-1]) % 3 == 0]
    compared = [s for s in samples if s not in scored]
    assert scored
    assert compared
    lengths = sorted({len(s.text) for s in compared})
    for sample in samples:
        assert sample.failure is None, sample.failure_detail
        assert sample.reward is not None
        rank = 100 * len(compared) + lengths.index(len(sample.text)) if sample in compared else 0
        assert sample.reward.total == (rank if sample in compared else -1.5)


def test_numbers_that_the_program_prints_are_parts(tmp_path: Path) -> None:
    program = TWO_TURNS.replace("print(0.25)", """print('{"score": -2, "steps": 3}')""")
    with played(tmp_path, program) as game:
        sample = game.play_one()
    assert sample.reward is not None
    assert sample.reward.total == -2.0
    assert sample.reward.parts == {"env": -2.0, "env/steps": 3.0}


REWRITES = """
first = chat(TASK["messages"])
second = chat([*TASK["messages"], said(first), {"role": "user", "content": "go on"}])
third = chat([{"role": "user", "content": "in short"}])
fourth = chat([*TASK["messages"], said(first), {"role": "user", "content": "no, this"}])
print(1)
"""


def test_a_rewritten_history_becomes_branches(tmp_path: Path) -> None:
    with played(tmp_path, REWRITES, history="tree") as game:
        sample = game.play_one()
        counts = game.scorer.stats().num_requests
    assert sample.failure is None, sample.failure_detail
    assert len(sample.branches) == 2
    paths = [*sample.paths.values()]
    assert [len(path.turns) for path in paths] == [2, 1, 1]
    sampled = [
        tuple(path.token_ids[turn.start : turn.end]) for path in paths for turn in path.turns
    ]
    assert len(sampled) == 4
    for path in paths:
        of_turns = [n for turn in path.turns for n in range(turn.start, turn.end)]
        assert of_turns == [n for n, mask in enumerate(path.loss_mask) if mask]
        versions = [v != NOT_SAMPLED for v in path.weight_versions]
        assert versions == [*map(bool, path.loss_mask)]
    first = paths[0]
    context = first.prompt_ids + tuple(first.token_ids[: first.turns[0].end])
    assert sample.prompt.token_ids[: len(context)] == context
    assert len(sample.prompt.token_ids) > len(context)
    assert sample.prompt.text.endswith("no, this<|im_end|>\n<|im_start|>assistant\n")
    assert counts == {"bridged": 1, "forks": 1, "branches": 1, "repeated": 0}


def test_a_linear_history_must_not_be_rewritten(tmp_path: Path) -> None:
    with played(tmp_path, REWRITES, retries=3) as game:
        sample = game.play_one()
        assert game.scorer.stats().num_restarts == 0
    assert sample.failure is FailureKind.INVALID
    assert "env.history = tree" in sample.failure_detail


def test_requests_of_one_program_are_sampled_together(tmp_path: Path) -> None:
    program = """
from threading import Thread
threads = [
    Thread(target=chat, args=([{"role": "user", "content": f"part {n}"}],)) for n in range(4)
]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(1)
"""
    with played(tmp_path, program, history="tree") as game:
        most = 0

        def count() -> None:
            nonlocal most
            most = max(most, len(game.engine._running))

        game.engine.on_step = count
        game.engine.gate.clear()
        runner = game.runner()
        group = group_of(game.episodes, indices=[0])
        runner.submit([group])
        until(lambda: game.scorer._handover._num_open == 4)
        game.engine.gate.set()
        finish(runner)
    assert most == 4
    assert len(group.group.samples[0].paths) == 4


LIMITS = {
    "turns": (
        {"max_turns": 3},
        "for n in range(9):\n"
        "    answer = chat(messages)\n"
        "    messages += [said(answer), {'role': 'user', 'content': 'x'}]\n",
        StopReason.MAX_TURNS,
    ),
    "tokens": (
        {"max_turns": 1000},
        "while True:\n"
        "    answer = chat(messages)\n"
        "    messages += [said(answer), {'role': 'user', 'content': 'x'}]\n",
        StopReason.LENGTH,
    ),
}


@pytest.mark.parametrize("name", LIMITS)
def test_a_program_that_meets_a_limit_is_scored(tmp_path: Path, name: str) -> None:
    """It ends with an error, since its request is refused; what it did until then counts."""
    env, program, reason = LIMITS[name]
    (tmp_path / "rewards.py").write_text("def score(completion):\n    return 0.5\n")
    functions = [{"fn": f"{tmp_path / 'rewards.py'}:score"}]
    start = "messages = [*TASK['messages']]\n"
    with played(tmp_path, start + program, functions=functions, **env) as game:
        sample = game.play_one()
    assert sample.failure is None, sample.failure_detail
    assert sample.reward is not None
    assert sample.reward.total == 0.5
    assert sample.stop_reason is reason
    assert sample.truncated
    assert len(sample.token_ids) <= SAMPLING.max_tokens
    assert len(sample.turns) == (3 if name == "turns" else len(sample.turns))
    if name == "tokens":
        assert len(sample.token_ids) > SAMPLING.max_tokens - 100


def test_turns_are_cut_to_their_longest(tmp_path: Path) -> None:
    with played(tmp_path, TWO_TURNS, max_turn_tokens=3) as game:
        sample = game.play_one()
    assert [turn.end - turn.start for turn in sample.turns] == [3, 3]
    assert sample.stop_reason is StopReason.LENGTH


FAILURES = {
    "exit code": ("print('lost', file=sys.stderr)\nsys.exit(3)\n", "exit code 3; .* lost"),
    "signal": ("os.kill(os.getpid(), 9)\n", "signal SIGKILL; .* nothing"),
    "no turn": ("print(1)\n", "without a turn"),
    "raises": ("chat(TASK['messages'])\nraise KeyError('mine')\n", "KeyError: 'mine'"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_program_that_fails_is_played_again_and_then_has_failed(
    tmp_path: Path, name: str
) -> None:
    program, detail = FAILURES[name]
    with played(tmp_path, program, retries=2) as game:
        sample = game.play_one()
        assert game.scorer.stats().num_restarts == 2
    assert sample.failure is FailureKind.EXCEPTION
    assert sample.reward is None
    assert re.search(detail, sample.failure_detail, re.DOTALL), sample.failure_detail
    assert sample.attempt == 2


@pytest.mark.parametrize(
    "printed", ["float('nan')", "-float('inf')", "1 == 1", "'{\"score\": NaN}'"]
)
def test_a_score_that_is_no_number_fails(tmp_path: Path, printed: str) -> None:
    """It is none, and not left to the functions."""
    (tmp_path / "rewards.py").write_text("def score(completion):\n    return 0.5\n")
    functions = [{"fn": f"{tmp_path / 'rewards.py'}:score"}]
    program = f"chat(TASK['messages'])\nprint({printed})\n"
    with played(tmp_path, program, functions=functions, retries=1) as game:
        sample = game.play_one()
        assert game.scorer.stats().num_restarts == 0
    assert sample.failure is FailureKind.INVALID
    assert sample.reward is None


def test_a_second_attempt_has_the_turns_of_its_own(tmp_path: Path) -> None:
    """With the same seed, so that it samples the same first turn."""
    program = f"""
answer = chat(TASK["messages"])
place = {str(tmp_path / "attempts")!r}
with open(place, "a") as file:
    file.write(answer["choices"][0]["message"]["content"] + "\\n")
if len(open(place).read().splitlines()) < 2:
    sys.exit(1)
print(1)
"""
    with played(tmp_path, program, retries=1) as game:
        sample = game.play_one()
    assert sample.failure is None, sample.failure_detail
    assert sample.attempt == 1
    assert len(sample.turns) == 1
    first, second = (tmp_path / "attempts").read_text().splitlines()
    assert first == second == sample.turns[0].text


@pytest.mark.parametrize("prints", [True, False])
def test_a_program_past_its_deadline_may_print_a_score(tmp_path: Path, prints: bool) -> None:
    program = f"""
import signal, time
def end(*_):
    if {prints}:
        print(0.5, flush=True)
    os._exit(0)
signal.signal(signal.SIGTERM, end)
chat(TASK["messages"])
while True:
    time.sleep(60)
"""
    with played(tmp_path, program, retries=2) as game:
        runner, group = game.runner(), group_of(game.episodes, indices=[0])
        runner.submit([group])
        while not game.engine.submitted or game.engine.has_unfinished:
            runner.step()
        for live in game.scorer._programs._live.values():
            live.ends_at = 0.0
        finish(runner)
        assert game.scorer.stats().num_restarts == 0
    (sample,) = group.group.samples
    assert len(sample.turns) == 1
    if prints:
        assert sample.reward is not None
        assert sample.reward.total == 0.5
        assert sample.stop_reason is StopReason.DEADLINE
    else:
        assert sample.failure is FailureKind.TIMEOUT
        assert "env.episode_timeout_s" in sample.failure_detail


def test_a_turn_that_the_program_leaves_is_none_of_its_turns(tmp_path: Path) -> None:
    program = """
import http.client
from urllib.parse import urlsplit
place = urlsplit(BASE)
connection = http.client.HTTPConnection(place.hostname, place.port)
body = json.dumps({"messages": TASK["messages"]})
headers = {"Authorization": f"Bearer {KEY}"}
connection.request("POST", place.path + "/chat/completions", body, headers)
connection.close()
chat([{"role": "user", "content": "another"}])
print(1)
"""
    with played(tmp_path, program, history="tree") as game:
        sample = game.play_one()
    assert sample.failure is None, sample.failure_detail
    assert all(sum(path.loss_mask) > 0 for path in sample.paths.values())
    assert sample.prompt.text.count("another") == 1


def test_the_key_of_a_program_sets_no_reward(tmp_path: Path) -> None:
    program = """
chat(TASK["messages"])
for path, body in (("/reward", {"reward": 1}), ("/end", {})):
    try:
        post(path, body, base=BASE.removesuffix("/v1"))
    except urllib.error.HTTPError as error:
        assert error.code == 403, error.code
    else:
        sys.exit(7)
print(0)
"""
    with played(tmp_path, program) as game:
        sample = game.play_one()
    assert sample.failure is None, sample.failure_detail
    assert sample.reward is not None
    assert sample.reward.total == 0.0


def test_the_distribution_is_that_of_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program = """
chat(TASK["messages"], temperature=0.1, top_p=0.5, stop=["end"])
print(0)
"""
    sampling = replace(SAMPLING, temperature=0.7, stop=("over",))
    with played(tmp_path, program) as game:
        game.play(group_of(game.episodes, sampling=sampling))
        for request in game.engine.submitted:
            assert request.sampling.temperature == 0.7
            assert request.sampling.top_p == 1.0
            assert request.sampling.stop == ("over", "end")
    (said,) = (
        r.getMessage()
        for r in caplog.records
        if "of their own" in r.getMessage() or "their own" in r.getMessage()
    )
    assert "temperature, top_p" in said


def test_a_request_that_has_come_is_not_waited_for(tmp_path: Path) -> None:
    """Else an idle engine would begin each turn a wait later."""
    with played(tmp_path, TWO_TURNS) as game:
        waits: list[float] = []
        poll = game.scorer.scorer.poll
        game.scorer.scorer.poll = lambda timeout_s, **more: (
            waits.append(timeout_s) or poll(0.0, **more)
        )
        game.scorer._wake_up()
        game.scorer.poll(30.0)
        assert waits == [0.0]
        game.scorer.poll(30.0)
        assert waits == [0.0, 0.0, 30.0]


def test_programs_rest_while_another_runner_plays(tmp_path: Path) -> None:
    """As training's do during an evaluation: requests that they make meanwhile wait."""
    go_on = tmp_path / "go on"
    program = TWO_TURNS.replace(
        "    messages +=",
        f"    while not os.path.exists({str(go_on)!r}):\n        time.sleep(0.01)\n    messages +=",
    )
    with played(tmp_path, f"import time\n{program}", concurrency=2) as game:
        training = game.runner()
        groups = [group_of(game.episodes, group_id=f"1-{n}", number=n) for n in range(2)]
        training.submit(groups)
        while len(game.engine.submitted) < 2 or game.engine.has_unfinished:
            training.step()
        training.withdraw()
        assert game.scorer.pending == 0
        go_on.touch()  # both programs have a turn, and ask for the next one
        until(lambda: len(game.scorer._handover._new) == 2)
        num_before = len(game.engine.submitted)
        held = group_of(game.episodes, group_id="eval-0", number=9)
        samples = game.play(held)
        assert [sample.failure for sample in samples] == [None, None]
        assert len(game.engine.submitted) == num_before + 4, "none of training's was sampled"
        training.resume(groups)
        finish(training)
    assert [sample.failure for group in groups for sample in group.group.samples] == [None] * 4


def test_an_evaluation_that_is_stopped_leaves_programs_that_rest(tmp_path: Path) -> None:
    with played(tmp_path, TWO_TURNS) as game:
        training = game.runner()
        group = group_of(game.episodes)
        game.engine.gate.clear()
        training.submit([group])
        until(lambda: game.scorer._handover._num_open == 2)
        training.poll()
        training.withdraw()
        stopped = game.runner()
        stopped.submit([group_of(game.episodes, group_id="eval-0", number=9)])
        until(lambda: game.scorer._handover._num_open == 4)
        stopped.poll()
        stopped.drop()
        game.engine.gate.set()
        training.resume([group])
        finish(training)
        until(lambda: len(game.door._sessions) == 0)
    assert [sample.failure for sample in group.group.samples] == [None, None]


def test_programs_of_groups_that_are_dropped_end(tmp_path: Path) -> None:
    with played(tmp_path, TWO_TURNS) as game:
        runner = game.runner()
        kept, dropped = (group_of(game.episodes, group_id=f"1-{n}", number=n) for n in range(2))
        game.engine.gate.clear()
        runner.submit([kept, dropped])
        until(lambda: game.scorer._handover._num_open == 4)
        runner.poll()
        runner.withdraw()
        game.engine.gate.set()
        runner.resume([kept])
        finish(runner)
        until(lambda: len(game.door._sessions) == 0)
    assert [sample.failure for sample in kept.group.samples] == [None, None]
    assert not dropped.group.samples


def test_a_command_that_never_plays_ends_the_run_early(tmp_path: Path) -> None:
    with played(tmp_path, "sys.exit(1)\n") as game:
        game.scorer.scorer._cfg = game.scorer.scorer._cfg.model_copy(
            update={"max_failure_rate": 0.5}
        )
        groups = [
            group_of(game.episodes, group_id=f"1-{n}", number=n, indices=range(8)) for n in range(4)
        ]
        with pytest.raises(FailureRateError, match="first 24 samples"):
            game.play(*groups)


def test_nothing_is_left_of_an_episode(tmp_path: Path) -> None:
    """A program may leave processes and files behind."""
    program = f"""
import subprocess
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
with open({str(tmp_path / "left")!r}, "a") as file:
    file.write(f"{{child.pid}} {{os.environ['HONE_EPISODE_DIR']}}\\n")
open(os.path.join(os.environ["TMPDIR"], "file"), "w").close()
chat(TASK["messages"])
print(1)
"""
    with played(tmp_path, program) as game:
        samples = game.play(group_of(game.episodes))
        assert [sample.failure for sample in samples] == [None, None]
        for line in (tmp_path / "left").read_text().splitlines():
            pid, folder = line.split()
            until(lambda pid=pid: not Path(f"/proc/{pid}").exists())
            until(lambda folder=folder: not Path(folder).exists())


def test_ids_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    """The first messages are rendered by the chat template, once."""
    with played(tmp_path, TWO_TURNS) as game:
        sample = game.play_one()
    tokenizer = tokenizer_of()
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], tokenize=False, add_generation_prompt=True
    )
    assert sample.prompt.text == text
    assert [*sample.prompt.token_ids] == tokenizer(text)["input_ids"]
    assert sample.prompt.answer == "world"
