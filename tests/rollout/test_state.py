"""What a checkpoint keeps of groups: every field of every type, but those that are named here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, MutableSequence, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from enum import Enum
from itertools import count
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest

from hone.observe.episode_rows import read_turns
from hone.observe.loggers import json_line, sample_row
from hone.rollout.buffer import Buffer, InFlightGroup
from hone.rollout.episodes import Episodes
from hone.rollout.runner import Runner
from hone.rollout.settings import RolloutConfig
from hone.rollout.state import sample_from_dict, sample_to_dict
from hone.types import Sample
from tests.rollout.fakes import CyclicPrompts, FakeEngine, FakeScorer

TIMES = ("policy_s", "env_s")
NOT_KEPT = {
    # Times are of no use to who goes on, and differ between checkpoints that are equal else.
    "Turn.policy_s",
    "Turn.env_s",
    "InFlightGroup.number",  # equals `order` in a buffer
    "InFlightGroup.rank",  # processes share the groups anew
    # A checkpoint is made while nobody else has a sample, and all processes have all of them.
    "InFlightGroup.unscored",
    "InFlightGroup.undecided",
    "InFlightGroup.is_compared",
    "InFlightGroup.is_opened",
    "InFlightGroup.is_shared",
}


class Filling:
    """Makes values in which no field has its default and no number comes twice, so that a field
    that gets lost is seen. `alternative` is the index of the type that a union gets."""

    def __init__(self, alternative: int) -> None:
        self._alternative = alternative
        self._numbers = count(1)

    def __call__(self, kind: Any) -> Any:
        if is_dataclass(kind):
            return self._object(kind)
        origin, arguments = get_origin(kind), get_args(kind)
        if origin in (Union, UnionType):
            others = [each for each in arguments if each is not NoneType]
            return self(others[self._alternative])
        if origin is Literal:
            return arguments[-1]
        if origin is tuple:
            return (self(arguments[0]),)
        if origin in (list, Sequence, MutableSequence):
            return [self(arguments[0])]
        if origin in (dict, Mapping):
            return {self(arguments[0]): self(arguments[1])}
        if kind is Any:
            return {"any": [self(int)]}
        if issubclass(kind, Enum):
            return [*kind][-1]
        number = next(self._numbers)
        return {int: number, float: number / 8, str: f"text {number}", bool: True}[kind]

    def _object(self, kind: Any) -> Any:
        hints = get_type_hints(kind)
        return kind(**{own.name: self._field(own, hints[own.name]) for own in fields(kind)})

    def _field(self, field: Field[Any], kind: Any) -> Any:
        if field.name == "routes":
            return np.full((2, 1, 2), self(int), np.uint8)
        if field.name == "shown":  # kept once for all sequences, see tests/envs/test_images.py
            return None
        value = (not field.default) if kind is bool and field.default is not MISSING else self(kind)
        assert value != field.default, field.name
        return value


def differences(one: Any, other: Any, place: str = "") -> Iterator[str]:
    """The fields, `<class>.<field>`, in which two values differ, also those that `==` passes
    over."""
    if is_dataclass(one) and type(one) is type(other):
        for field in fields(one):
            own = f"{type(one).__name__}.{field.name}"
            yield from differences(getattr(one, field.name), getattr(other, field.name), own)
    elif isinstance(one, Mapping) and isinstance(other, Mapping) and one.keys() == other.keys():
        for name in one:
            yield from differences(one[name], other[name], place)
    elif isinstance(one, np.ndarray):
        if not isinstance(other, np.ndarray) or one.dtype != other.dtype or (one != other).any():
            yield place
    elif isinstance(one, tuple | list) and type(one) is type(other) and len(one) == len(other):
        for mine, its in zip(one, other, strict=True):
            yield from differences(mine, its, place)
    elif type(one) is not type(other) or one != other:
        yield place


def buffer() -> Buffer:
    scorer, cfg = FakeScorer(), RolloutConfig()
    episodes = Episodes(decode=str, max_turns=1, run_seed=0, purpose="rollout")
    return Buffer(Runner(FakeEngine(), scorer, episodes), scorer, CyclicPrompts(), cfg)


@pytest.mark.parametrize("alternative", [0, -1])
def test_a_checkpoint_keeps_every_field(alternative: int) -> None:
    entry: InFlightGroup = Filling(alternative)(InFlightGroup)
    entry.group.samples.append(replace(entry.group.samples[0], prompt=entry.group.prompt))
    before, after = buffer(), buffer()
    before.by_id[entry.group.id] = entry
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    (restored,) = after
    entry.sampling = restored.sampling  # is that of the settings, which may have changed
    lost = set(differences(entry, restored))
    assert lost == NOT_KEPT, "keep it, or say in NOT_KEPT why it is not needed"


def test_rows_of_what_a_checkpoint_kept_differ_in_times_alone() -> None:
    """Also where an environment has ended the episode with its first turn."""
    sample: Sample = Filling(0)(Sample)
    turn = replace(sample.turns[0], observed="", messages=())
    for own in (sample, replace(sample, turns=[turn], branches=[])):
        kept = json.loads(json.dumps(sample_to_dict(own, own.prompt)))
        rows = [*map(row_without_times, (own, sample_from_dict(kept, own.prompt)))]
        assert rows[0] == rows[1]
        assert read_turns(rows[1]) is not None


def row_without_times(sample: Sample) -> dict[str, Any]:
    row = json.loads(json_line(sample_row(sample, with_times=True)))
    for turn in row["turns"] + [turn for path in row.get("branches", ()) for turn in path["turns"]]:
        for name in TIMES:
            turn.pop(name, None)
    return row
