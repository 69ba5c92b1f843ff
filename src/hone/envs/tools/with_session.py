"""A session whose policy may call tools too, such as a simulated user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from hone.envs.calling import awaited
from hone.envs.env import Answer
from hone.envs.session import Action, DataRow, End, Opening, Session
from hone.envs.tools.session import ToolSession
from hone.types import Observation

__all__ = ["WithTools"]


class WithTools:
    """Answers turns with calls by the tools, and all others by the session."""

    def __init__(self, session: Session, tools: ToolSession) -> None:
        self._session, self._tools = session, tools
        self._finish_session = getattr(session, "finish", None)
        if self._finish_session is not None:  # without one, rewards of observations count
            self.finish = self._finish

    @property
    def environment(self) -> object:
        """The object of the episode as its author knows it."""
        return getattr(self._session, "environment", self._session)

    async def start(self, row: DataRow) -> Opening:
        """Start the servers of tools, then the session."""
        await self._tools.start(row)
        return await awaited(self._session.start(row))

    async def step(self, action: Action) -> Answer | End:
        """The answers of the tools, or that of the session where the turn has no calls or is the
        last one."""
        if (action.tool_calls or action.parse_error) and not action.must_end:
            answer = await self._tools.step(action)
            assert not isinstance(answer, End), "a turn with calls is answered"
            return answer
        answer = await awaited(self._session.step(action))
        if isinstance(answer, str | Observation) or _is_messages(answer):
            return cast(Answer, answer)
        return self._with_metrics(answer)

    async def _finish(self) -> End:
        """The score of the session where a limit ends the episode."""
        assert self._finish_session is not None
        return self._with_metrics(await awaited(self._finish_session()))

    async def close(self) -> None:
        """Close both."""
        try:
            close = getattr(self._session, "close", None)
            if close is not None:
                await awaited(close())
        finally:
            await self._tools.close()

    def _with_metrics(self, answer: Any) -> End:
        """The end, with what was counted of the tools."""
        end = answer if isinstance(answer, End) else End(score=answer)
        return replace(end, metrics={**end.metrics, **self._tools.metrics()})


def _is_messages(answer: object) -> bool:
    return isinstance(answer, list | tuple) and not isinstance(answer, Mapping)
