"""Rules on runs that sample with SGLang."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

from hone.config.rules.facts import Facts
from hone.config.rules.rule import error, excludes, unused, warning, with_facts
from hone.config.rules.view import View
from hone.config.tree import SAMPLING
from hone.engine.sglang import facts
from hone.engine.sglang.facts import FAMILIES, INSTALL, PYTHON, VERSIONS

__all__ = ["RULES"]

_BACKEND, _SGLANG = "engine.backend", "engine.backend = sglang"
_SIZE = "engine.tensor_parallel_size"


class SGLangFacts(Facts):
    """The facts that rules on SGLang compare."""

    @cached_property
    def is_sglang_family(self) -> bool:
        """Whether a sync finds the model's weights in SGLang."""
        return self.model.family in (None, *FAMILIES)


def _not_served(view: View) -> Iterator[Mapping[str, object]]:
    """The Python that should have SGLang, where it has none or another version."""
    if view.known.get("can_install", False):
        return
    python = facts.interpreter()
    version = facts.installed_version(python)
    if version is None or not facts.is_served(version):
        has = "no SGLang" if version is None else f"SGLang {version}"
        yield {"python": python, "has": has}


RULES = with_facts(
    SGLangFacts,
    error(_SGLANG, each=_not_served, only=SAMPLING,
          says="engine.backend is sglang, and {python} has {has}",
          why=f"versions {VERSIONS} are served, with other versions of transformers than hone's",
          fix=f"install one in an environment of its own ({INSTALL}) and name its Python in the "
          f"environment variable {PYTHON} | {_BACKEND} = embedded"),
    error(_SGLANG, "@sees_images", only=SAMPLING,
          says="engine.backend is sglang, and {the_model} sees images",
          why="SGLang gets texts alone from hone", fix=f"{_BACKEND} = embedded"),
    error(_SGLANG, "not @is_sglang_family", only=SAMPLING, given=("not @sees_images",),
          says="engine.backend is sglang, and {the_model} is of the family {family}",
          why=f"of SGLang's models hone knows the weights of {', '.join(FAMILIES)}",
          fix=f"{_BACKEND} = embedded"),
    *excludes(_SGLANG, f"{_BACKEND} = embedded", {
        "model.exact": ("its kernels are not the trainer's", "false"),
        "engine.kv_cache_dtype = fp8":
            ("its FP8 scales are not set anew for each weight version", "auto"),
        "engine.weight_dtype = int8": ("its formats of 8 bits are not filled by syncs", "auto"),
        f"{_SIZE} > 1": ("each server has one device", "1"),
    }),
    error(_SGLANG, "algorithm.routing_replay", only=("rl",),
          why="hone does not ask SGLang for the experts that tokens pass",
          fix=f"algorithm.routing_replay = false | {_BACKEND} = embedded"),
    error(_SGLANG, "pipeline.max_staleness", "cluster.num_engines = 0",
          why="the server works on the device of the trainer, and this engine in a thread of it",
          fix=f"set cluster.num_engines | {_BACKEND} = embedded"),
    *(error(_SGLANG, condition, only=SAMPLING,
            why="SGLang draws from a part of the distribution then, and reports log-probabilities "
            "of the whole",
            fix=f"{key} = {value} | {_BACKEND} = embedded")
      for condition, key, value in (
          ("sampling.top_p < 1", "sampling.top_p", "1"),
          ("sampling.top_k > 0", "sampling.top_k", "0"),
          ("sampling.min_p > 0", "sampling.min_p", "0"))),
    warning("run.seed is set", _SGLANG, only=SAMPLING,
            why="no seed is sent to SGLang, which draws by a generator of its own, so that the "
            "tokens of two runs differ",
            fix=f"{_BACKEND} = embedded"),
    error(_SGLANG, only=("bench engine",),
          why="`hone bench engine` measures the embedded engine",
          fix=f"{_BACKEND} = embedded"),
    unused("engine.enable_sleep", _SGLANG, "run.device = cpu", only=SAMPLING,
           why="SGLang frees nothing there"),
)  # fmt: skip
