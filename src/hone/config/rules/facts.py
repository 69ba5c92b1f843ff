"""Facts that rules of several parts compare; those of one part lie with its rules.

A fact is an attribute that is computed once for a view of a run: a `Fact`, which a message names,
or a plain value. Where it cannot be known it raises NotKnownError, or lets what it reads raise it,
and no condition on it holds.

    class EngineFacts(Facts):
        @cached_property
        def broken_rows(self) -> int: ...

    RULES = with_facts(EngineFacts, error("engine.weight_dtype = int8", "@broken_rows", ...))

A condition reads it as `@broken_rows`, a text as `{broken_rows}`, and code as `view.broken_rows`.
"""

from __future__ import annotations

from functools import cache, cached_property

from hone.config.rules.view import Fact, NotKnownError, View, required
from hone.families.registry import SPECS, spec_of

__all__ = ["LONG_ROW", "Facts"]

LONG_ROW = 32768
"""Tokens of a row above which it fills a device by itself: packing several brings nothing."""


class Facts(View):
    """A run, and what follows from its plan."""

    @classmethod
    @cache
    def names(cls) -> frozenset[str]:
        """All facts of this class and of those that it extends."""
        return frozenset(
            name
            for part in cls.__mro__
            if issubclass(part, Facts)
            for name, value in vars(part).items()
            if isinstance(value, cached_property)
        )

    # -- rows and processes ----------------------------------------------------------------------

    @cached_property
    def longest(self) -> Fact[int]:
        """Tokens of the longest row that is trained."""
        if self.command == "bench train":
            return Fact(self["rows.tokens"], "the longest row", "rows.tokens")
        tokens = required(self.plan.max_sequence_tokens, "longest")
        return Fact(tokens, "the longest sequence", " + ".join(self.plan.max_sequence_keys))

    @cached_property
    def longest_share(self) -> Fact[int]:
        """Tokens of the longest row that one device has."""
        row, size = self.longest, self.context_size.value
        if size == 1:
            return row
        noun = f"its part on each of {size} processes that share the longest sequence"
        return Fact(-(-row.value // size), noun, f"({row.how}) / {size}")

    @cached_property
    def num_processes(self) -> Fact[int]:
        """Processes that train, or without a trainer sample."""
        number = required(self.plan.world_size, "world_size")
        apart = self.command == "rl" and self["cluster.num_critics"]
        which = " that train the policy" if apart else ""
        return Fact(number, f"the number of processes{which}")

    @cached_property
    def context_size(self) -> Fact[int]:
        """Processes that share the tokens of a row."""
        keys = "trainer.parallel.ring_size", "trainer.parallel.ulysses_size"
        return Fact(self[keys[0]] * self[keys[1]], " x ".join(keys))

    @cached_property
    def is_apart(self) -> bool:
        """Whether engines have weights of their own, and the first process directs them."""
        return self.plan.is_apart

    @cached_property
    def devices_needed(self) -> Fact[int]:
        """The sum of the devices of all roles."""
        roles = self["cluster"].devices(self["engine.tensor_parallel_size"])
        how = " + ".join(role.words for role in roles)
        return Fact(sum(role.number for role in roles), "the number of devices of all roles", how)

    @cached_property
    def learns_from_rewards(self) -> bool:
        """Whether rewards make advantages, rather than a teacher alone."""
        return self["teacher.path"] is None or self["teacher.reward_coef"] > 0

    @cached_property
    def evaluates(self) -> bool:
        """Whether a run evaluates at all."""
        return "eval" in self.plan.sampling or bool(self["eval"].is_scheduled)

    # -- the model -------------------------------------------------------------------------------

    @cached_property
    def the_model(self) -> str:
        """The model, by the setting that names it."""
        named = getattr(self.plan.config.model, "shape", None)
        return "the model of model.shape" if named else "the model at model.path"

    @cached_property
    def context_length(self) -> Fact[int | None]:
        """Positions the model was made for."""
        return Fact(self.model.context_length, f"the context of {self.the_model}")

    @cached_property
    def family(self) -> str:
        """`model_type` of the model, with an activation that layers of ours do not have."""
        act = self.model.hidden_act
        with_act = f" with the activation {act}" if act not in (None, "silu") else ""
        return f"{self.model.family}{with_act}"

    @cached_property
    def has_spec(self) -> bool:
        """Whether the model's family is one of hone's own."""
        return self.model.family in (None, *SPECS)

    @cached_property
    def sees_images(self) -> bool:
        """Whether the model is known to be a vision-language model."""
        return self.model.vision_family is not None

    @cached_property
    def is_hybrid(self) -> bool:
        """Whether the model is known to have layers of gated linear attention."""
        return spec_of(str(self.model.family)).is_hybrid

    @cached_property
    def tokens_per_image(self) -> Fact[int]:
        """Tokens of every image, whatever its size; not known where they follow from it."""
        tower = required(self.model.shape, "tower").tower
        number = required(tower and tower.tokens_per_image, "tokens_per_image")
        return Fact(number, f"the number of tokens of an image of {self.the_model}")

    @cached_property
    def largest_image(self) -> Fact[int]:
        """Tokens of the largest image."""
        if not self.sees_images:
            raise NotKnownError("largest_image")
        tower = required(self.model.shape, "tower").tower
        if tower is not None and tower.tokens_per_image is not None:
            return self.tokens_per_image
        return Fact(self["data.max_image_tokens"], "the largest image", "data.max_image_tokens")

    @cached_property
    def has_experts(self) -> bool:
        """Whether layers of the model are a mixture of experts."""
        return required(self.model.shape, "has_experts").num_experts > 0

    # -- the GPU ---------------------------------------------------------------------------------

    @cached_property
    def gpu(self) -> str:
        """The GPU, where it is known."""
        return "unknown" if self.plan.devices.gpu is None else self.plan.devices.gpu.name

    @cached_property
    def uses_gpu_of_host(self) -> bool:
        """Whether the run uses GPUs of this host, and is not planned for another host."""
        there = self.plan.devices
        return there.kind == "cuda" and there.per_node is not None

    @cached_property
    def lacks_fp8(self) -> bool:
        """Whether the GPU is known to multiply no eight-bit floats."""
        gpu = self.plan.devices.gpu
        return gpu is not None and self.plan.device == "cuda" and not gpu.has_fp8
