"""`hone env check`: what of an environment would be refused, before a run is started.

A worker loads it, as in a run. Then an episode of the first row is started, its opening is
rendered, one turn is answered, and the answer is rendered. What a run would refuse, or lose samples
to, is a `Problem` with a remedy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from hone.config.env_try import EnvTryConfig
from hone.errors import UserError
from hone.images.parts import is_parts
from hone.rewards.scorer import Scorer
from hone.tools.env_try.language import Language, in_words
from hone.tools.env_try.play import episodes_of, sampling_of, scorer_of
from hone.tools.env_try.policy import completion_of
from hone.types import FailureKind, Prompt, Request, Sample

__all__ = ["Checked", "Problem", "check", "not_loaded"]

_LATE_SHARE = 0.5
"""Share of a deadline from which a call is called slow."""
_REMEDIES = {
    FailureKind.TIMEOUT: "make the call faster, or raise its deadline: env.turn_timeout_s of a "
    "session, reward.timeout_s of an environment without one",
    FailureKind.OUT_OF_MEMORY: "raise reward.memory_limit_gib, or load less in each worker",
    FailureKind.CRASH: "its process has ended: look for what exits or is killed in it",
    FailureKind.EXCEPTION: "mend what is raised there; a run plays an episode again "
    "`env.retries` times after an error, then its sample has failed",
    FailureKind.INVALID: "return what docs/environments.md lists for the method",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that a run would refuse (an error), or that it would suffer from (a warning)."""

    what: str
    remedy: str
    is_error: bool = True


@dataclass(slots=True)
class Checked:
    """What was found out about an environment."""

    kind: str = ""
    """`session` or `stateless`; empty where it could not be loaded."""
    shape: str = ""
    """Of a session, the framework whose shape it has, or `tools`."""
    tools: tuple[str, ...] = ()
    """Names of the tools that the policy may call."""
    times_s: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds of `import`, `start` and `first answer`, as far as it came."""
    said: dict[str, str] = field(default_factory=dict[str, str])
    """What it said at its `start`, and as `first answer`, in short."""
    problems: list[Problem] = field(default_factory=list[Problem])

    @property
    def has_errors(self) -> bool:
        return any(problem.is_error for problem in self.problems)


def check(cfg: EnvTryConfig, language: Language) -> Checked:
    """Load the environment and play the beginning of an episode. Raises UserError only where no
    environment is named."""
    checked = Checked()
    began = perf_counter()
    try:
        scorer = scorer_of(cfg, language)
    except UserError:
        raise
    except ValueError as error:
        return not_loaded(error)
    with scorer:
        checked.times_s["import"] = perf_counter() - began
        checked.kind = "stateless" if scorer.sessions is None else "session"
        if scorer.environment is not None:
            checked.shape = scorer.environment.shape
            checked.tools = tuple(
                str(tool["function"]["name"]) for tool in scorer.environment.tools
            )
        _Trial(cfg, language, scorer, checked).run()
    checked.problems += _slow(cfg, checked)
    return checked


def not_loaded(error: ValueError) -> Checked:
    """What is known of an environment that cannot be loaded."""
    problem = Problem(f"it cannot be loaded: {error}", "mend env.path, env.args or env.tools")
    return Checked(problems=[problem])


def _slow(cfg: EnvTryConfig, checked: Checked) -> Iterator[Problem]:
    is_session = checked.kind == "session"
    key = "env.turn_timeout_s" if is_session else "reward.timeout_s"
    limit = cfg.env.turn_timeout_s if is_session else cfg.reward.timeout_s
    for name in ("start", "first answer"):
        seconds = checked.times_s.get(name, 0.0)
        if _LATE_SHARE * limit < seconds < limit:
            yield Problem(
                f"{name} took {seconds:.1f} s of the {limit:g} s that a call may take; under the "
                "load of a run it will be later",
                f"raise {key}, or load what is slow once, when the module is imported",
                is_error=False,
            )


@dataclass(slots=True)
class _Trial:
    """The beginning of an episode of the first row."""

    cfg: EnvTryConfig
    language: Language
    scorer: Scorer
    checked: Checked

    def run(self) -> None:
        prompt = self.language.prompts[0]
        sample = self._begin(prompt)
        if self.scorer.sessions is not None:
            if not self._start(sample):
                return
            if self.cfg.env.concurrency > 1:
                self._compare_starts(prompt, sample)
        self._answer(sample)
        self.scorer.cancel()  # closes the session

    def _begin(self, prompt: Prompt) -> Sample:
        episodes = episodes_of(self.cfg, self.language, self.scorer)
        return episodes.begin(prompt, "check/0", number=0)

    def _request(self, prompt: Prompt) -> Request:
        sampling = sampling_of(self.cfg, self.language)
        episodes = episodes_of(self.cfg, self.language, self.scorer)
        return episodes.first_request("check/0", prompt, sampling, number=0)

    def _start(self, sample: Sample) -> bool:
        """Start a session and render its opening. False where that fails."""
        if not self._call("start", sample):
            return False
        assert sample.observation is not None
        self.checked.said["start"] = _short(sample.observation.content)
        return self._render("start", sample)

    def _compare_starts(self, prompt: Prompt, first: Sample) -> None:
        """Start a second session with the same seed: it must say the same."""
        second = self._begin(prompt)
        second.id = "check/1"
        self.scorer.submit(second)
        self._wait()
        if second.observation is None:
            return  # a second failure of its own says nothing on seeds
        said = _short(second.observation.content)
        if self._render("start", second) and _seen(second.prompt) != _seen(first.prompt):
            self.checked.problems.append(
                Problem(
                    "two sessions with the same row and seed start differently: "
                    f"{self.checked.said['start']!r} and {said!r}. So the samples of a group play "
                    "different games, and an episode that is played again is another one",
                    "draw what is random from `random.Random(row.seed)`",
                    is_error=False,
                )
            )

    def _answer(self, sample: Sample) -> None:
        """Answer a first turn, which says the row's answer, or its prompt where it has none."""
        prompt = sample.prompt
        request = self._request(prompt)
        text = prompt.answer or "hello"
        completion = completion_of(request, text, self.language.encode, self.language.end_id)
        episodes = episodes_of(self.cfg, self.language, self.scorer)
        episodes.take(sample, completion, max_tokens=self.language.max_tokens)
        if not self._call("first answer", sample):
            return
        if sample.observation is None:
            assert sample.reward is not None
            self.checked.said["first answer"] = f"the end, with reward {sample.reward.total:.4g}"
            return
        self.checked.said["first answer"] = _short(sample.observation.content)
        self._render("first answer", sample)

    def _call(self, name: str, sample: Sample) -> bool:
        """Submit the sample and wait. Takes note of the time, and of a failure."""
        began = perf_counter()
        self.scorer.submit(sample)
        self._wait()
        self.checked.times_s[name] = perf_counter() - began
        if sample.failure is None:
            return True
        self.checked.problems.append(
            Problem(
                f"{name} of row {sample.prompt.id}: {sample.failure}: {sample.failure_detail}",
                _REMEDIES.get(sample.failure, "see the message"),
            )
        )
        return False

    def _render(self, name: str, sample: Sample) -> bool:
        """Turn what was said into tokens. Takes note where that cannot be."""
        episodes = episodes_of(self.cfg, self.language, self.scorer)
        limit = self.language.max_tokens
        request = self._request(sample.prompt)
        if episodes.next_request(sample, request, max_tokens=limit) is not None:
            return True
        if sample.failure is not None:
            problem = Problem(
                f"what it says ({name}) cannot be rendered: {sample.failure_detail}",
                "answer with a text, say less, or name another template in model.chat_template",
            )
        else:
            problem = Problem(
                f"what it says ({name}) leaves no token for a turn: the longest completion is "
                f"{limit:,} tokens",
                "say less, or raise the longest completion (rollout.max_completion_tokens)",
            )
        self.checked.problems.append(problem)
        return False

    def _wait(self) -> None:
        while self.scorer.pending:
            self.scorer.poll(timeout_s=1.0)


def _seen(prompt: Prompt) -> tuple[object, ...]:
    """All that tells the policy which game it plays."""
    return prompt.text, *prompt.model_input.key


def _without_images(content: Any) -> Any:
    """What was said, with words for images."""
    if is_parts(content):
        return in_words(content)
    return [
        {**message, "content": in_words(message["content"])} if "content" in message else message
        for message in content
    ]


def _short(content: object, most: int = 160) -> str:
    """What was said, in a line."""
    text = content if isinstance(content, str) else repr(_without_images(content))
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[:most]}…"
