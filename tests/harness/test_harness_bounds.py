"""What programs may take, and what they must not lose: sessions, places, folders, memory, time."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hone.envs.session import End, ModelAccess
from hone.model_input import TEXT, Content, ModelInput
from hone.rewards import program as programs
from hone.rewards.live_programs import _step
from hone.rewards.program import ProgramSession
from hone.rewards.shapes import ProgramError
from hone.types import FailureKind, Observation, StopReason
from tests.door.served import until
from tests.harness.played import SAMPLING, Played, finish, group_of, played
from tests.harness.programs import command_of
from tests.harness.test_harness_scorer import TWO_TURNS


def resting(game: Played, num: int) -> Any:
    """A runner whose `num` programs rest, each with a request, and its group."""
    runner, group = game.runner(), group_of(game.episodes, indices=range(num))
    game.engine.gate.clear()
    runner.submit([group])
    until(lambda: game.scorer._handover._num_open == num)
    runner.poll()
    runner.withdraw()
    game.engine.gate.set()
    return runner, group


def test_programs_find_room_for_their_sessions(tmp_path: Path) -> None:
    """Where one cannot be started, the next gets its place before the door has ended its session;
    others rest."""
    wrapper = tmp_path / "start"
    wrapper.write_text(f"#!/bin/sh\nexec {command_of(tmp_path, 'program', TWO_TURNS)}\n")
    wrapper.chmod(0o700)
    harness = {"command": str(wrapper)}
    with played(tmp_path, TWO_TURNS, concurrency=1, max_sessions=2, harness=harness) as game:
        training, group = resting(game, 1)
        wrapper.unlink()
        samples = game.play(group_of(game.episodes, group_id="eval-0", number=9, indices=range(4)))
        training.resume([group])
        finish(training)
    assert {sample.failure for sample in samples} == {FailureKind.EXCEPTION}
    assert "cannot be started" in samples[0].failure_detail
    assert group.group.samples[0].failure is None


def test_a_short_deadline_of_turns_is_none_of_a_program(tmp_path: Path) -> None:
    program = "import time\nchat(TASK['messages'])\ntime.sleep(1)\nprint(1)\n"
    with played(tmp_path, program, turn_timeout_s=0.2) as game:
        sample = game.play_one()
    assert sample.failure is None, sample.failure_detail


def test_a_program_without_score_and_functions_has_failed(tmp_path: Path) -> None:
    with played(tmp_path, "chat(TASK['messages'])\nprint('done')\n") as game:
        sample = game.play_one()
    assert sample.reward is None
    assert sample.failure is FailureKind.INVALID


def test_no_folder_is_left_of_programs_that_rest_at_the_end(tmp_path: Path) -> None:
    place = tmp_path / "folders"
    program = (
        f"with open({str(place)!r}, 'a') as file:\n"
        "    file.write(os.environ['HONE_EPISODE_DIR'] + '\\n')\n"
    ) + TWO_TURNS
    with played(tmp_path, program) as game:
        resting(game, 2)
        folders = [Path(line) for line in place.read_text().splitlines()]
        mode = 0o700 if os.geteuid() else 0o711  # commands may run as another user
        assert [folder.stat().st_mode & 0o777 for folder in folders] == [mode, mode]
    assert not any(folder.exists() for folder in folders)


def test_nothing_is_remembered_of_sessions_that_have_ended(tmp_path: Path) -> None:
    with played(tmp_path, TWO_TURNS) as game:
        game.play(group_of(game.episodes, indices=range(3)))
        until(lambda: len(game.door._sessions) == 0)
        assert not game.door.repeats._turns


def test_only_what_differs_from_the_run_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = {"temperature=0.7": "", "temperature=1.0": "temperature", "temperature=None": ""}
    asked |= {"stop_token_ids=[5]": "stop_token_ids", "ignore_eos=True": "ignore_eos"}
    program = f"chat(TASK['messages'], **eval('dict(' + {[*asked]}[TASK['columns']['n']] + ')'))\n"
    sampling = replace(SAMPLING, temperature=0.7)
    with played(tmp_path, program + "print(1)\n") as game:
        for number, ignored in enumerate(asked.values()):
            group = group_of(game.episodes, sampling=sampling, indices=[0], number=number, n=number)
            caplog.clear()
            (sample,) = game.play(group)
            assert sample.failure is None, sample.failure_detail
            said = [r.getMessage() for r in caplog.records if "their own" in r.getMessage()]
            assert len(said) == bool(ignored), (number, said)
            assert all(f"their own {ignored}," in text for text in said)


def test_only_programs_that_ask_wait_for_the_engine(tmp_path: Path) -> None:
    """The others of their group may still ask in time."""
    program = (
        "import time\n"
        f"lock = {str(tmp_path / 'asking')!r}\n"
        "try:\n"
        "    os.mkdir(lock)\n"
        "except FileExistsError:\n"
        f"    while not os.path.exists({str(tmp_path / 'go')!r}):\n"
        "        time.sleep(0.01)\n"
    ) + TWO_TURNS
    with played(tmp_path, program) as game:
        runner, group = game.runner(), group_of(game.episodes)
        runner.submit([group])
        until(lambda: game.scorer._handover._num_open == 1)
        runner.poll()
        assert (runner.num_undecided, runner.num_waiting) == (2, 1)
        (tmp_path / "go").touch()
        finish(runner)


def row_without_task(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A row whose program gets an empty task, and a model that nobody serves."""
    monkeypatch.setattr(programs, "_task", lambda _: b"{}")
    access = ModelAccess(base_url="http://127.0.0.1:1", api_key="key", name="model")
    return SimpleNamespace(model=access)


def test_no_signal_goes_to_a_process_that_was_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may have its id by then."""
    row = row_without_task(monkeypatch)
    sent = list[int]()
    monkeypatch.setattr(os, "killpg", lambda pid, number: sent.append(number))
    session = ProgramSession("true", tmp_path)
    session.start(row)
    assert session._process is not None
    session._process.wait()
    session.close()
    assert signal.SIGKILL not in sent
    assert not list(tmp_path.iterdir())


def test_a_program_without_room_for_its_folder_fails_by_the_name_of_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = row_without_task(monkeypatch)
    session = ProgramSession("true", tmp_path / "gone")
    with pytest.raises(
        ProgramError, match=r"Could not write .*/gone \(TMPDIR in the environment\)"
    ):
        session.start(row)
    session.close()


def test_a_sample_has_no_images_that_its_program_did_not_send(tmp_path: Path) -> None:
    image = ModelInput((Content(kind="image", hash="a", start=0, num_tokens=1),))
    with played(tmp_path, TWO_TURNS) as game:
        group = group_of(game.episodes, indices=[0])
        group.group.prompt = replace(group.group.prompt, model_input=image)
        (sample,) = game.play(group)
    assert sample.prompt.answer == "world"
    assert sample.prompt.model_input is TEXT


RUDE = {
    "reads nothing, and its task does not fit into a pipe": (
        "import os, json, urllib.request\n"
        "base, key = os.environ['OPENAI_BASE_URL'], os.environ['OPENAI_API_KEY']\n"
        "body = json.dumps({'messages': [{'role': 'user', 'content': 'hello'}]}).encode()\n"
        "head = {'Authorization': f'Bearer {key}'}\n"
        "urllib.request.urlopen(urllib.request.Request(base + '/chat/completions', body, head))\n"
        "print(1)\n"
    ),
    "prints much": "chat(TASK['messages'])\nprint('x' * 5_000_000)\nprint()\nprint(1)\n",
    "leaves a process that holds its output open": (
        "import subprocess\n"
        "chat(TASK['messages'])\n"
        "subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        "print(1)\n"
    ),
}


@pytest.mark.parametrize("name", RUDE)
def test_a_rude_program_is_scored(tmp_path: Path, name: str) -> None:
    with played(tmp_path, RUDE[name]) as game:
        if name.startswith("reads nothing"):
            (tmp_path / "program.py").write_text(RUDE[name])  # without what reads the task
        sample = game.play_one(long="x" * 1_000_000)
    assert sample.failure is None, sample.failure_detail
    assert sample.reward is not None
    assert sample.reward.total == 1.0


def test_a_program_that_ignores_sigterm_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "_task", lambda _: b"{}")
    monkeypatch.setattr(programs, "_GRACE_S", 0.1)
    access = ModelAccess(base_url="http://127.0.0.1:1", api_key="key", name="model")
    row: Any = SimpleNamespace(model=access)
    session = ProgramSession("sh -c 'trap \"\" TERM; echo 3; while :; do sleep 1; done'", tmp_path)
    session.start(row)
    out = session._outputs[0]
    until(lambda: out._kept == b"3\n")
    step = _step(StopReason.DEADLINE).action
    assert step is not None
    answer = session.step(step)
    assert answer == Observation(state={"has_ended": True, "was_cut": True})
    end = session.step(replace(step, must_end=True, index=1))
    session.close()
    assert end == End(score=3.0, truncated=True)


def test_episodes_leave_nothing_in_the_driver(tmp_path: Path) -> None:
    """Neither descriptors nor threads nor records of samples."""

    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    with played(tmp_path, TWO_TURNS, history="tree") as game:
        runner = game.runner()
        game.play(group_of(game.episodes, indices=range(2)), runner=runner)
        until(lambda: not game.door._sessions._open)
        before = held()
        for number in range(1, 4):
            group = group_of(game.episodes, group_id=f"1-{number}", number=number, indices=range(4))
            game.play(group, runner=runner)
        until(lambda: not game.door._sessions._open)
        # Connections of programs that have ended are closed a moment later.
        until(lambda: held()[0] <= before[0] + 1)
        assert held()[1] <= before[1]
        scorer = game.scorer
        assert not scorer._episodes
        assert not scorer._programs._limits
        assert not scorer.scorer._submitted
        assert not scorer._handover._new
        assert not scorer._handover._waiting
        assert scorer._handover._num_open == 0
        assert (runner.num_undecided, runner._num_requests) == (0, 0)
        assert not runner.groups
        assert not runner._dropped


def test_a_running_program_is_one_sample_of_those_that_wait_for_scores(tmp_path: Path) -> None:
    """However often it is asked whether it has ended."""
    with played(tmp_path, TWO_TURNS) as game:
        game.play(group_of(game.episodes, indices=range(3)))
        assert game.scorer.scorer._batch == {"samples": 3, "done": 3}
