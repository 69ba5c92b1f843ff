"""Environments of other frameworks, run unchanged. Here is how they are recognised; a file for each
framework says how they are called.

`env.path` names one by a prefix (`PREFIXES`), or by `path/to/file.py:Name` or `module:Name`. Then
its class shows the shape: by the framework's base class where it has one, else by its methods.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from hone.envs.calling import check_args
from hone.envs.shapes import (
    gymnasium,
    openenv,
    openrlhf,
    reasoning_gym,
    skyrl,
    textarena,
    trl,
    verifiers,
    verl,
    verl_bases,
)
from hone.envs.shapes.maker import EnvMaker, Resolve, Source, probe
from hone.errors import listed

__all__ = [
    "PREFIXES",
    "SHAPES",
    "EnvMaker",
    "Shape",
    "files_problem",
    "made_from",
    "methods_problem",
    "prefix_of",
]

PREFIXES: Mapping[str, Callable[[str, Mapping[str, Any], Resolve], EnvMaker]] = {
    "gymnasium": lambda name, args, _: gymnasium.by_name(name, args),
    "openenv": lambda name, args, _: openenv.by_address(name, args),
    "reasoning_gym": lambda name, args, _: reasoning_gym.no_environment(name, args),
    "skyrl": lambda name, args, _: skyrl.by_name(name, args),
    "textarena": textarena.by_name,
    "verifiers": lambda name, args, _: verifiers.by_id(name, args),
    "verl": verl.by_files,
}
"""Environments that a framework knows by name, by the prefix of `env.path`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A kind of environment."""

    name: str
    methods: str
    """Its methods in words, for messages."""
    package: str | None = None
    """The top package of the framework's base class."""
    fits: Callable[[frozenset[str]], bool] = lambda _: False
    """Whether a class with these public methods has this shape."""
    maker: Callable[[Source], EnvMaker]


def _own(source: Source) -> EnvMaker:
    check_args(source.path, source.found, source.args)
    return EnvMaker(shape="hone", make=source.create, file=source.file)


SHAPES = (
    Shape(name="hone", methods="`start` and `step`",
          fits=lambda has: {"start", "step"} <= has, maker=_own),
    Shape(name="verifiers", methods="an Environment of verifiers", package="verifiers",
          maker=verifiers.maker),
    Shape(name="verl", methods="a BaseTool or BaseInteraction of verl", package="verl",
          fits=lambda has: has.isdisjoint({"start", "init", "reset", "step"})
          and ({"create", "execute", "release"} <= has or "generate_response" in has),
          maker=verl.maker),
    Shape(name="SkyRL-Gym", methods="`init` and `step`", package="skyrl_gym",
          fits=lambda has: {"init", "step"} <= has, maker=skyrl.maker),
    Shape(name="textarena", methods="`reset`, `step` and `get_observation`", package="textarena",
          fits=lambda has: {"reset", "step", "get_observation"} <= has, maker=textarena.maker),
    Shape(name="Gymnasium", methods="an Env of gymnasium", package="gymnasium",
          maker=gymnasium.maker),
    Shape(name="OpenRLHF", methods="`reset` and `step(self, states)`", package="openrlhf",
          fits=lambda has: {"reset", "step", "step(states)"} <= has, maker=openrlhf.maker),
    Shape(name="TRL", methods="`reset` and methods as tools, but no `step`, or `get_reward` too",
          fits=lambda has: "reset" in has and has.isdisjoint({"step(states)", "get_observation"})
          and bool(has - {"reset", "get_reward"}) and ("step" not in has or "get_reward" in has),
          maker=trl.maker),
)  # fmt: skip
"""The shapes that are recognised. hone's stateless environments (`step(self, episode)` alone) are
none of them."""


def files_problem(path: str) -> str | None:
    """Why the files are not there that `path` names, where its prefix stands before files; else
    None."""
    prefix, _, names = path.partition(":")
    return verl.files_problem(names) if prefix == "verl" else None


def prefix_of(path: str) -> str | None:
    """The prefix of a path that a framework knows by name, or None."""
    prefix, colon, _ = path.partition(":")
    return prefix if colon and prefix in PREFIXES else None


def made_from(path: str, args: Mapping[str, Any], *, resolve: Resolve) -> EnvMaker | None:
    """What makes the sessions of the environment that `path` names, with `env.args`; None where it
    is a stateless environment.

    It runs the code of the environment, so call it only in a worker.

    Raises:
        ValueError: There is no such environment, its shape is none or more than one, or it cannot
            be played.
        UserError: The package of its framework is not installed.
    """
    prefix = prefix_of(path)
    if prefix is not None:
        return PREFIXES[prefix](path.partition(":")[2], args, resolve)
    with openrlhf.bases(), verl_bases.bases():
        found = resolve(path, "environment")
    if inspect.isclass(found):
        kind = found
    elif callable(getattr(found, "step", None)):  # an object, which serves all episodes
        if not _is_stateless(_methods(type(found))):
            raise ValueError(
                f"'{path}' is an object, and each episode needs its own; name its class"
            )
        return None
    else:
        kind = type(probe(path, found, args))
    source = Source(path=path, found=found, args=args, type=kind, resolve=resolve)
    bases = {base.__module__.partition(".")[0] for base in kind.__mro__[1:]}
    for shape in SHAPES:
        if shape.package in bases:
            return shape.maker(source)
    methods = _methods(kind)
    if _is_stateless(methods):
        return None
    if (problem := methods_problem(methods)) is not None:
        raise ValueError(f"'{path}' is no environment: {problem}")
    return next(shape.maker(source) for shape in SHAPES if shape.fits(methods))


def methods_problem(methods: Collection[str]) -> str | None:
    """Why a class with these methods, and no base class, has no shape, or None.

    A `step` whose first parameter is `states` or `state_dict` counts as `step(states)` too, and one
    whose first parameter is `episode` as `step(episode)`.
    """
    has = frozenset(name for name in methods if not name.startswith("_"))
    if _is_stateless(has):
        return None
    fitting = [shape.name for shape in SHAPES if shape.fits(has)]
    if len(fitting) == 1:
        return None
    public = [f"`{name}`" for name in sorted(has) if name.isidentifier()]
    got = f"it has {listed(public) if public else 'no public methods'}"
    if fitting:
        return f"{got}, which is the shape of {listed(fitting)}; inherit from the base class of one"
    missing = ""
    if "reset" in has and has <= {"reset", "get_reward"}:
        missing = " For TRL's shape a public method is missing that the policy can call as a tool."
    known = "; ".join(f"{shape.name}: {shape.methods}" for shape in SHAPES)
    return f"{got}.{missing} Shapes: hone, stateless: `step(self, episode)`; {known}"


def _is_stateless(has: frozenset[str]) -> bool:
    return "step(episode)" in has or (
        "step" in has and has.isdisjoint({"start", "init", "reset", "step(states)"})
    )


def _methods(kind: type) -> frozenset[str]:
    """The names of a class's public methods, with marks for the first parameter of `step`."""
    names = {name for name, _ in inspect.getmembers(kind, callable) if not name.startswith("_")}
    step = inspect.getattr_static(kind, "step", None)
    if inspect.isfunction(step):
        first = list(inspect.signature(step).parameters)[1:2]
        if first == ["episode"]:
            names.add("step(episode)")
        elif openrlhf.takes_states(kind):
            names.add("step(states)")
    return frozenset(names)
