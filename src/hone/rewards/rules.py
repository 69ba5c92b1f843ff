"""Rules on reward functions. The user's files are parsed, never imported."""

from __future__ import annotations

import ast
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

from hone.address import is_address, names_code
from hone.config.rules.facts import Facts
from hone.config.rules.rule import error, unused, warning, with_facts
from hone.config.rules.view import Details, Fact, required
from hone.data.settings import template_fields
from hone.envs.shapes import files_problem, methods_problem, prefix_of
from hone.extras import missing_extra
from hone.families.model_facts import ModelFacts
from hone.rewards.settings import (
    ANSWER_REWARDS,
    BUILTIN_REWARDS,
    CODE_TIMEOUT_S,
    RewardConfig,
    RewardFunctionConfig,
)
from hone.user_code.inherited import inherited
from hone.user_code.signatures import (
    ENVIRONMENTS,
    missing_column,
    needed_columns,
    one_at_a_time,
    parsed_class,
    parsed_parameters,
    signature_problem,
    takes_labels,
)

__all__ = ["RULES", "columns_needed", "needs_columns"]

Found = Iterator[Details]
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class RewardFacts(Facts):
    """What rules on rewards compare."""

    @cached_property
    def first_rows(self) -> Mapping[str, Sequence[tuple[str, Collection[str]]]]:
        """The first rows of each source, as a place and the row's columns."""
        return required(self.known.get("first_rows"), "first_rows")

    @cached_property
    def reward_problems(self) -> Sequence[Details]:
        """Functions that cannot be made as the settings say."""
        return required(self.known.get("reward_problems"), "reward_problems")

    @cached_property
    def has_weight(self) -> bool:
        """Whether a function counts."""
        return any(function.weight for function in self["reward.functions"])

    @cached_property
    def clips_all_alike(self) -> bool:
        """Whether the range of rewards is empty or a single number."""
        clip = self["reward.clip"]
        return clip is not None and clip[0] >= clip[1]

    @cached_property
    def waits_for_services(self) -> bool:
        """Whether a service or a judge scores."""
        return self["reward"].waits_for_services

    @cached_property
    def cores(self) -> Fact[int]:
        """CPU cores of this host, four times."""
        number = os.cpu_count() or 1
        return Fact(4 * number, "four times this host's CPU cores", f"4 x {number}")

    @cached_property
    def reward_model_context(self) -> Fact[int]:
        """Tokens that the reward model was made for."""
        path = required(self["reward.model.path"], "reward.model.path")
        facts = required(ModelFacts.known(path), path)
        length = required(facts.context_length, path)
        return Fact(length, "the context of reward.model.path")

    @cached_property
    def tokens_per_judged_image(self) -> Fact[int]:
        """Tokens that the reward model makes of every image, whatever its size; not known where
        they follow from it."""
        path = required(self["reward.model.path"], "reward.model.path")
        tower = required(required(ModelFacts.known(path), path).shape, path).tower
        number = required(tower and tower.tokens_per_image, path)
        return Fact(number, "the number of tokens of an image of reward.model.path")


def _functions(view: RewardFacts) -> Iterator[tuple[str, RewardFunctionConfig]]:
    for index, function in enumerate(view["reward.functions"]):
        yield f"reward.functions.{index}", function


def _wrong(view: RewardFacts) -> Found:
    for key, function in _functions(view):
        problem = _problem(function.fn)
        if problem is not None:
            yield {"key": key, "fn": function.fn, "problem": problem}


def _failing_imports(view: RewardFacts) -> Found:
    """Modules that the user's files import when they are loaded, and that are not there. Where
    packages are installed later, nothing is known."""
    if view.known.get("can_install", False):
        return
    specs = {f"{key}.fn": function.fn for key, function in _functions(view)}
    specs |= {f"env.tools.{place}": spec for place, spec in enumerate(view["env.tools"])}
    if view["env.path"] is not None:
        specs["env.path"] = view["env.path"]
    for key, spec in specs.items():
        file = Path(spec.rpartition(":")[0])
        if file.suffix == ".py" and _problem(spec) is None:
            yield from ({"key": key, "problem": problem} for problem in _missing_modules(file))


def _missing_modules(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    if "sys.path" in text:  # the file itself says where they are
        return
    for node in ast.parse(text).body:
        match node:
            case ast.ImportFrom(level=level) if level > 0:
                yield (
                    f"line {node.lineno} of '{path}' has a relative import, and a file that is "
                    "named by its path is in no package. Write the name of the module"
                )
                continue
            case ast.ImportFrom(module=str(module)):
                modules = [module]
            case ast.Import(names=names):
                modules = [alias.name for alias in names]
            case _:
                continue
        for top in (module.partition(".")[0] for module in modules):
            if not _is_importable(top, path.parent):
                yield (
                    f"line {node.lineno} of '{path}' imports '{top}', which is not installed. "
                    f"Install it, or put {top}.py beside the file"
                )


def _is_importable(module: str, folder: Path) -> bool:
    places = (place / name for place in (Path(), folder) for name in (module, f"{module}.py"))
    return find_spec(module) is not None or any(place.exists() for place in places)


def _wrong_signature(view: RewardFacts) -> Found:
    for key, function in _functions(view):
        problem = None
        if _problem(function.fn) is not None:
            continue
        if is_address(function.fn):
            continue
        if not names_code(function.fn):
            problem = one_at_a_time(f"'{function.fn}'") if function.whole_groups else None
        elif (parameters := parsed_parameters(function.fn)) is not None:
            problem = signature_problem(
                parameters, function.fn, function.args, whole_groups=function.whole_groups
            )
        yield from [] if problem is None else [{"key": key, "problem": problem}]


def _comparing(view: RewardFacts) -> Found:
    """Functions that are called with whole groups."""
    for key, function in _functions(view):
        yield from [{"key": f"{key}.whole_groups"}] * function.whole_groups


def _without_environments(view: RewardFacts) -> Found:
    """Functions of whole groups that would take the environments of the episodes, if they could.
    Where they must, their signature is wrong."""
    for key, function in _functions(view) if view["env"].is_set else []:
        parameters = parsed_parameters(function.fn) if names_code(function.fn) else None
        named = [parameter.name for parameter in parameters or []]
        if function.whole_groups and ENVIRONMENTS in named:
            yield {"key": key, "fn": function.fn}


def _missing_package(view: RewardFacts) -> Found:
    for key, function in _functions(view):
        if function.fn == "math":
            missing = missing_extra("math_verify", needed_by=f"{key}.fn=math")
            yield from [] if missing is None else [{"missing": missing}]


def _late_tests(view: RewardFacts) -> Found:
    """`code_tests` that may take as long as the call that runs them, which is killed then."""
    for key, function in _functions(view):
        seconds = function.args.get("timeout_s", CODE_TIMEOUT_S)
        if function.fn == "code_tests" and isinstance(seconds, int | float):
            yield from [{"key": key, "seconds": seconds}] * (seconds >= view["reward.timeout_s"])


def needs_columns(reward: RewardConfig) -> bool:
    """Whether a function asks for a column of the data, as far as its file tells."""
    return any(_needed(one) or _takes_labels(one) for one in reward.functions)


def columns_needed(reward: RewardConfig) -> list[tuple[str, str]]:
    """Each function with a column of the data that it asks for, as far as its file tells. The
    column `answer` is the one that has this role."""
    return [(one.fn, name) for one in reward.functions for name in _needed(one)]


def _missing_column(view: RewardFacts) -> Found:
    """What functions ask for by name and the first rows of a source, each a place and its columns,
    do not have."""
    for key, function in _functions(view):
        for name in _needed(function):
            for source, rows in view.first_rows.items():
                lacking = [row for row in rows if name not in row[1]]
                if lacking:
                    among = f"the first {len(rows)} rows of {source}"
                    problem = missing_column(function.fn, name, lacking, among, source=source)
                    yield {"key": key, "problem": problem}


def _empty_labels(view: RewardFacts) -> Found:
    """Sources without an answer, whose labels are empty."""
    for key, function in _functions(view):
        for source, rows in view.first_rows.items() if _takes_labels(function) else []:
            if rows and not any("answer" in columns for _, columns in rows):
                columns = ", ".join(sorted(rows[0][1])) or "none"
                yield {"key": key, "fn": function.fn, "source": source, "columns": columns}


def _takes_labels(function: RewardFunctionConfig) -> bool:
    return names_code(function.fn) and takes_labels(parsed_parameters(function.fn) or [])


def _needed(function: RewardFunctionConfig) -> list[str]:
    """Columns that a function asks for, as far as parsing its file tells."""
    if function.fn in ANSWER_REWARDS:
        return ["answer"]
    if function.fn == "judge":
        fields = template_fields(str(function.args.get("template", "")))
        return [name for name in fields if name not in ("prompt", "completion", "task")]
    parameters = parsed_parameters(function.fn) if names_code(function.fn) else None
    return needed_columns(parameters or [], function.args)


def _problem(fn: str) -> str | None:
    """What is wrong with the name of a reward function, or None."""
    if inherited(fn) is not None or is_address(fn):  # what is wrong with that, is said elsewhere
        return None
    target, colon, name = fn.rpartition(":")
    if target == "__main__":
        return (
            "a function of the program that trained with hone.rl, which cannot be imported here. "
            "Write it into a file, and name path/to/file.py:function."
        )
    if not colon:
        if fn in BUILTIN_REWARDS:
            return None
        near = get_close_matches(fn, BUILTIN_REWARDS, 1)
        hint = f" Did you mean {near[0]}?" if near else ""
        return (
            f"no built-in of that name.{hint} Built-ins: {', '.join(BUILTIN_REWARDS)}; your own: "
            "package.module:function or path/to/file.py:function; a service: its http:// address."
        )
    if name[:1].isdigit():  # HOST:PORT
        return f"malformed; the address of a service is http://{fn}."
    if not target or not name.isidentifier():
        return "malformed; write package.module:function or path/to/file.py:function."
    if target.endswith(".py"):
        return _problem_in_file(Path(target), name)
    if not all(part.isidentifier() for part in target.split(".")):
        return f"'{target}' is neither a module's name nor a file that ends in .py."
    top = target.split(".")[0]
    if not _is_importable(top, Path()):
        return f"there is no module '{top}'; install it, or give the path of a .py file."
    return None


def _problem_in_file(path: Path, name: str) -> str | None:
    if not path.is_file():
        where = "" if path.is_absolute() else f" in {Path.cwd()}"
        return f"there is no file '{path}'{where}."
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    except SyntaxError as problem:
        return f"line {problem.lineno} of '{path}' is not valid Python: {problem.msg}."
    except (OSError, ValueError) as problem:
        return f"'{path}' cannot be read: {problem}."
    bound = _bound_names(tree)
    if name in bound or "*" in bound:
        return None
    defined = [x.name for x in tree.body if isinstance(x, (*_FUNCTIONS, ast.ClassDef))]
    return f"'{path}' defines no '{name}'; it defines: {', '.join(defined) or 'none'}."


def _wrong_env(view: RewardFacts) -> Found:
    """What is wrong with the name of the environment, or with the class as far as it is written."""
    path: str = view["env.path"]
    if ":" not in path:
        yield {"problem": "malformed; write path/to/file.py:Class or package.module:Class."}
    elif prefix_of(path) is not None:  # its framework knows the name
        if (problem := files_problem(path)) is not None:
            yield {"problem": f"{problem}."}
    elif (problem := _problem(path)) is not None:
        yield {"problem": problem}
    elif (found := parsed_class(path)) is not None and not found.bases:
        methods = [one.name for one in found.body if isinstance(one, _FUNCTIONS)]
        firsts = [one.args.args[1:2] for one in found.body if isinstance(one, _FUNCTIONS)]
        marks = [
            f"step({first[0].arg})"
            for name, first in zip(methods, firsts, strict=True)
            if name == "step" and first
        ]
        if (problem := methods_problem([*methods, *marks])) is not None:
            yield {"problem": problem}


def _no_reward_model(view: RewardFacts) -> Found:
    """Why a model gives no score."""
    facts = ModelFacts.known(view["reward.model.path"])
    if facts is None or facts.classifies is None:
        return
    if not facts.classifies:
        yield {"problem": "is no model for sequence classification, which gives no score"}
    elif facts.num_labels != 1:
        yield {"problem": f"tells {facts.num_labels} classes apart, and a reward is one number"}


def _bound_names(tree: ast.Module) -> set[str]:
    """Every name that a module binds by a definition, an import or an assignment."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Import() | ast.ImportFrom():
                names.update(alias.asname or alias.name for alias in node.names)
            case ast.Name(ctx=ast.Store()):
                names.add(node.id)
            case _:
                pass
    return names


_WITHOUT_ENV = (
    "env.path = unset",
    "env.harness.command = unset",
    "reward.model.path = unset",
)

RULES = with_facts(
    RewardFacts,
    error("not reward.functions", given=_WITHOUT_ENV,
          only=("rl", "eval"),
          fix="name at least one | name an environment in env.path | name a model in "
          "reward.model.path"),
    error("keep != all", "not reward.functions",
          given=_WITHOUT_ENV,
          why="completions without a reward are all alike",
          fix="name at least one of reward.functions | name an environment in env.path | "
          "name a model in reward.model.path | keep = all"),
    error("keep = pairs", "n_samples_per_prompt = 1", why="a pair needs two completions",
          fix="raise n_samples_per_prompt"),
    warning("keep = best", "n_samples_per_prompt = 1", why="the best of one is that one",
            fix="raise n_samples_per_prompt | keep = all"),
    unused("pass_threshold", "keep = all|best|pairs", why="only keep passing compares with it"),
    error("reward.functions", "not @has_weight", given=("reward.model.path = unset",),
          says="every weight of reward.functions is 0",
          why="so is every reward", fix="give at least one entry a weight"),
    error("@clips_all_alike", says="reward.clip is {reward.clip}",
          why="its first number must be below the second", fix="reward.clip = [-10, 10]"),
    error("reward.model.weight = 0", given=("reward.model.path", "not @has_weight"),
          why="nothing else has a weight, so that every reward is 0",
          fix="reward.model.weight = 1 | give a function a weight"),
    error("reward.model.path", each=_no_reward_model,
          says="reward.model.path '{reward.model.path}' {problem}",
          fix="name a model for sequence classification with one label"),
    warning("@longest > @reward_model_context", given=("reward.model.path",),
            why="samples that are longer in its tokens fail",
            fix="lower what adds up to the row | use a model with a longer context"),
    error("data.max_image_tokens < @tokens_per_judged_image", given=("reward.model.path",),
          why="its family makes as many of an image of any size",
          fix="data.max_image_tokens = {tokens_per_judged_image} | more"),
    unused("reward.model.(weight|max_tokens_per_forward)", "reward.model.path = unset",
           why="there is no reward model", instead="name a model in reward.model.path"),
    error(each=_wrong, says="{key}.fn '{fn}'", why="{problem}"),
    error(each=_failing_imports, says="{key}", why="{problem}"),
    error(each=_wrong_signature, says="{key}.fn", why="{problem}"),
    error(each="@reward_problems", says="{key}.fn '{fn}'", why="{problem}"),
    error(each=_missing_column, says="{key}.fn", why="{problem}"),
    warning(each=_empty_labels, says="{key}.fn",
            why="'{fn}' takes labels, and all of them are '', since no column of {source} is taken "
            "for the answer (columns: {columns})",
            fix="name it in {source}.columns.answer | take no labels"),
    error(each=_missing_package, says="{missing}"),
    error(each=_late_tests,
          says="{key}.args.timeout_s is {seconds}, and reward.timeout_s is {reward.timeout_s}",
          why="a program that never ends would count as a failure of scoring, not as wrong",
          fix="raise reward.timeout_s above {seconds}"),
    warning("sampling.n_samples_per_prompt = 1", each=_comparing,
            says="{key} is on, and sampling.n_samples_per_prompt is 1",
            why="there is nothing to compare a completion with",
            fix="raise sampling.n_samples_per_prompt"),
    warning(each=_without_environments,
            says="{key}.whole_groups is on, and '{fn}' takes `environments`",
            why="they have ended when the group is scored, so that it gets the parameter's default",
            fix="leave {key}.whole_groups out | take no `environments`"),
    error("env.path", each=_wrong_env, says="env.path '{env.path}'", why="{problem}"),
    unused("env.args", "env.path = unset", instead="name the environment in env.path"),
    unused("env.(max_turns|max_turn_tokens|turn_timeout_s|episode_timeout_s|retries|concurrency)",
           "env.path = unset", "not env.tools", "env.harness.command = unset",
           instead="name an environment in env.path | name tools in env.tools"),
    warning("reward.num_workers > @cores", given=("not @waits_for_services",),
            why="more than one or two a core only takes memory, unless functions wait",
            fix="leave reward.num_workers unset"),
    warning("reward.max_failure_rate = 1",
            why="the run goes on even when no sample can be scored",
            fix="use a value below 1"),
)  # fmt: skip
