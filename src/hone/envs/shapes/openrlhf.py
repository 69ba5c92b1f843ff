"""Agents of OpenRLHF: subclasses of `AgentInstanceBase`, as `--train.agent_func_path` takes them.

    class AgentInstance(AgentInstanceBase):
        async def reset(self, states, **kwargs):           # {"observation": prompt, "label": label}
            return {"observation": states["observation"]}

        async def step(self, states, **kwargs):
            return {"rewards": ..., "scores": ..., "environment_feedback": "...", "done": False,
                    "sampling_params": ..., "extra_logs": {...}}

Called as `MultiTurnAgentExecutor.execute` of OpenRLHF 0.11 does: one instance for each sample, the
feedback appended to the tokens as it is, without a chat template, the rewards of all steps added.
hone differs on purpose in this:

- `reset` may append to the prompt, not rewrite it: the ids of the prompt are made once.
- Of returned `sampling_params` only `stop` is used, for the next turn. OpenRLHF sets `max_tokens`
  itself, as hone does; the temperature is one number in a run of hone, since ratios are computed at
  it.
- The feedback of the last step is not appended: nothing is sampled after it.
- `environment_images` stand where the feedback has a placeholder of the model's, or `<image>`, and
  before it where it has none.
- An exception is a failure of the sample. It does not end the run.

OpenRLHF needs DeepSpeed and Ray even to import its base classes. Where it is not installed, `bases`
stands in for them, so that a file of agents is imported as it is.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

from hone.envs.session import Action, DataRow, Opening
from hone.envs.shapes.maker import EnvMaker, Source
from hone.envs.shapes.reading import appended_text, finite_numbers, number_of
from hone.envs.shapes.stepping import Reply, SteppingSession
from hone.extras import is_installed
from hone.types import Message, Observation

__all__ = ["bases", "maker", "takes_states"]

_IMAGE_MARK = re.compile(
    r"<\|vision_start\|><\|image_pad\|><\|vision_end\|>|<start_of_image>|<image>"
)
"""What agents write for an image, as the templates of Qwen, Gemma and others do."""
_MODULES = ("openrlhf", "openrlhf.utils", "openrlhf.utils.agent")


@contextmanager
def bases() -> Generator[None]:
    """Let modules that are imported in the block import `AgentInstanceBase` and the executors from
    `openrlhf.utils.agent`, where OpenRLHF is not installed."""
    if is_installed("openrlhf"):
        yield
        return
    modules = {name: ModuleType(name) for name in _MODULES}
    for base in (AgentInstanceBase, AgentExecutorBase, MultiTurnAgentExecutor):
        setattr(modules["openrlhf.utils.agent"], base.__name__, base)
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            sys.modules.pop(name, None)


class AgentInstanceBase:
    """In place of OpenRLHF's class: an agent whose `reset` changes nothing."""

    __module__ = "openrlhf.utils.agent"

    async def reset(self, states: dict[str, Any], **_: Any) -> dict[str, Any]:
        """The states as they are."""
        return states


class AgentExecutorBase:
    """In place of OpenRLHF's class, whose subclasses have loops of their own."""

    __module__ = "openrlhf.utils.agent"


class MultiTurnAgentExecutor(AgentExecutorBase):
    """In place of OpenRLHF's class, of which only the class of agents is used."""

    __module__ = "openrlhf.utils.agent"

    def __init__(self, agent_instance_cls: type) -> None:
        self.agent_instance_cls = agent_instance_cls


def takes_states(kind: type) -> bool:
    """Whether the first parameter of `step` is called as OpenRLHF calls it. A class in this shape
    need not inherit from OpenRLHF, which is hard to install."""
    step = inspect.getattr_static(kind, "step", None)
    if not inspect.isfunction(step):
        return False
    names = list(inspect.signature(step).parameters)[1:2]
    return names in (["states"], ["state_dict"])


def maker(source: Source) -> EnvMaker:
    """The maker of a class of agents. `AgentExecutor`, the class that OpenRLHF looks for in a file,
    stands for the agents that it makes.

    Raises ValueError for an executor with a loop of its own.
    """
    create = _agents(source)
    return EnvMaker(shape="OpenRLHF", make=lambda: OpenRLHFSession(create()), file=source.file)


def _agents(source: Source) -> Callable[[], Any]:
    names = {base.__name__ for base in source.type.__mro__}
    if "AgentExecutorBase" not in names:
        return source.create
    execute = getattr(source.type, "execute", None)
    is_own = execute is not None and execute.__module__ not in _MODULES
    if is_own or "MultiTurnAgentExecutor" not in names:
        raise ValueError(
            f"'{source.path}' has a loop of its own, which calls an engine of OpenRLHF; name a "
            "class of agents (AgentInstanceBase), or an executor of such (MultiTurnAgentExecutor)"
        )
    return source.probe().agent_instance_cls


class OpenRLHFSession(SteppingSession):
    """An episode of one agent."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._label: Any = ""
        self._observed = ""
        self._stop: tuple[str, ...] = ()
        self._logged: Mapping[str, Any] = {}

    async def start(self, row: DataRow) -> Opening:
        """Call `reset` with the rendered prompt. Raises ValueError where it rewrites it."""
        self._label = "" if row.raw_answer is None else row.raw_answer
        states = {"observation": row.prompt, "label": self._label}
        self._observed = (await self._agent.reset(states))["observation"]
        added = appended_text(row.prompt, self._observed, "`reset` of the agent")
        return Observation(added, role=None) if added else None

    async def play(self, action: Action) -> Reply:
        """Call `step` with the text so far and the turn, with the token that ended it, as
        OpenRLHF's engine gives it."""
        text = action.text + action.ended_by
        params = SimpleNamespace(max_tokens=action.tokens_left, stop=list(self._stop))
        result = await self._agent.step(
            {
                "observation_text": self._observed,
                "action_text": text,
                "label": self._label,
                "sampling_params": params,
            }
        )
        feedback: str = result["environment_feedback"]
        self._observed += text + feedback
        self._stop = _stop_strings(result.get("sampling_params") or params)
        scores = {} if (score := result.get("scores")) is None else {"scores": number_of(score)}
        self._logged = {**(result.get("extra_logs") or {}), **scores}
        return Reply(
            observation=Observation(
                _with_images(feedback, result.get("environment_images") or ()),
                role=None,
                stop=self._stop,
            ),
            reward=number_of(result["rewards"]),
            is_over=bool(result["done"]),
        )

    def metrics(self) -> Mapping[str, float]:
        """The numbers among `extra_logs` of the last step, and its `scores`."""
        return finite_numbers(self._logged)

    async def close(self) -> None:
        """OpenRLHF closes nothing."""


def _with_images(feedback: str, images: Sequence[Any]) -> str | list[Message]:
    """The feedback as parts, with its images in the place of their marks. Raises ValueError where
    their numbers differ."""
    if not images:
        return feedback
    first, *rest = _IMAGE_MARK.split(feedback)
    if not rest:
        first, rest = "", [*[""] * (len(images) - 1), feedback]
    if len(rest) != len(images):
        raise ValueError(
            f"`step` of the agent returned {len(images)} `environment_images`, and "
            f"`environment_feedback` has {len(rest)} marks for images; write one for each, or none"
        )
    parts: list[Message] = [{"type": "text", "text": first}]
    for image, text in zip(images, rest, strict=True):
        parts += [{"type": "image", "image": image}, {"type": "text", "text": text}]
    return parts


def _stop_strings(params: Any) -> tuple[str, ...]:
    stop = getattr(params, "stop", None) or ()
    return (stop,) if isinstance(stop, str) else tuple(stop)
