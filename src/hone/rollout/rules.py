"""Rules on what is sampled: lengths, distributions, groups, partial rollouts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from hone.config.rules.facts import Facts
from hone.config.rules.rule import error, unused, warning, with_facts
from hone.config.rules.view import Details, Fact, NotKnownError, required

__all__ = ["RULES"]

_PROMPT, _COMPLETION = "data.max_prompt_tokens", "sampling.max_completion_tokens"


class SamplingFacts(Facts):
    """What rules on sampling compare."""

    @cached_property
    def longest_sample(self) -> Fact[int]:
        """Tokens of the longest sequence that is sampled."""
        keys = _PROMPT, self.key(_COMPLETION)
        return Fact(sum(self[key] for key in keys), "the longest sequence", " + ".join(keys))

    @cached_property
    def is_trained(self) -> bool:
        """Whether what is sampled is trained on."""
        return self.section == "rollout"

    @cached_property
    def completion_limit(self) -> int:
        """Tokens that the model's context leaves to completions."""
        length = required(self.context_length.value, "context_length")
        return length - self["data.max_prompt_tokens"]

    @cached_property
    def has_empty_stop(self) -> bool:
        """Whether a text that ends completions is empty."""
        return "" in self["sampling.stop"]

    @cached_property
    def empty_range(self) -> bool:
        """Whether `rollout.reward_range` keeps no mean reward at all."""
        given = self["rollout.reward_range"]
        return given is not None and given[0] >= given[1]

    @cached_property
    def empty_band(self) -> bool:
        """Whether by `data.curriculum.pass_rate` every prompt rests."""
        given = self["data.curriculum.pass_rate"]
        return given is not None and given[0] >= given[1]

    @cached_property
    def band_is_beyond_rates(self) -> bool:
        """Whether `data.curriculum.pass_rate` is beyond what rewards from 0 to 1 have as a mean."""
        given = self["data.curriculum.pass_rate"]
        return given is not None and given[0] < given[1] and (given[0] < 0 or given[1] > 1)

    @cached_property
    def completion_alone_is_too_long(self) -> bool:
        """Whether a length that somebody set leaves no room for a prompt, whatever that has."""
        length = required(self.context_length.value, "context_length")
        return self.is_set(_COMPLETION) and self[_COMPLETION] >= length


def _bad_stop_ids(view: SamplingFacts) -> Iterator[Details]:
    try:
        size = view.model.vocab_size
    except NotKnownError:
        size = None
    for token_id in view["sampling.stop"]:
        if isinstance(token_id, int) and (token_id < 0 or (size is not None and token_id >= size)):
            limit = "" if size is None else f" and below the vocabulary size {size}"
            yield {"id": token_id, "limit": limit}


RULES = with_facts(
    SamplingFacts,
    # Lengths.
    error(f"{_COMPLETION} >= @context_length", given=("@completion_alone_is_too_long",),
          why="that holds prompt and completion", fix=f"lower {_COMPLETION}"),
    error(f"{_PROMPT} >= @context_length", given=("not @completion_alone_is_too_long",),
          only=("rl", "eval", "generate"), why="that holds prompt and completion",
          fix=f"lower {_PROMPT} to what a completion leaves"),
    error("@longest_sample > @context_length",
          given=(f"{_PROMPT} < @context_length", "not @completion_alone_is_too_long"),
          fix=f"{_COMPLETION} = {{completion_limit}} | lower {_PROMPT}"),
    error("data.max_tokens > @context_length", fix="data.max_tokens = {context_length}"),
    warning("eval.max_completion_tokens < rollout.max_completion_tokens", given=("@evaluates",),
            why="evaluation cuts answers that training lets finish",
            fix="eval.max_completion_tokens = {rollout.max_completion_tokens}"),
    # Any distribution.
    warning("sampling.temperature = 0", "sampling.n_samples_per_prompt > 1",
            given=("not @is_trained",),
            why="greedy samples of a prompt are all equal",
            fix="sampling.n_samples_per_prompt = 1 | raise sampling.temperature"),
    unused("sampling.(top_p|top_k|min_p)", "sampling.temperature = 0",
           why="that is greedy", instead="raise sampling.temperature"),
    error("@has_empty_stop",
          says="sampling.stop holds an empty text",
          why="it ends every completion at once",
          fix="remove it"),
    error(each=_bad_stop_ids,
          says="sampling.stop holds {id}",
          why="ids are at least 0{limit}",
          fix="remove it"),
    # The distribution that is trained on.
    error("rollout.temperature = 0",
          why="greedy samples of a prompt are all equal, and nothing can be learnt from them",
          fix="rollout.temperature = 1 | use a value above 0"),
    warning("rollout.temperature < 0.1", given=("rollout.temperature > 0",),
            why="groups will hardly differ, and log-probabilities are scaled up by its inverse",
            fix="use 0.6 to 1, which is usual"),
    # Groups, over-sampling, partial rollouts.
    error("rollout.dynamic_sampling", "rollout.n_samples_per_prompt = 1",
          why="groups whose rewards are all equal are dropped, which then is every group",
          fix="raise rollout.n_samples_per_prompt | rollout.dynamic_sampling = false"),
    unused("rollout.reward_range", "not rollout.dynamic_sampling",
           instead="rollout.dynamic_sampling = true"),
    error("@empty_range", says="rollout.reward_range is {rollout.reward_range}",
          why="no mean lies between the two", fix="write the lower one first, such as [0.1, 0.9]"),
    # Prompts that rest.
    unused("data.curriculum.rest_epochs", "not data.curriculum.pass_rate",
           instead="data.curriculum.pass_rate = [0, 1]"),
    error("@empty_band", says="data.curriculum.pass_rate is {data.curriculum.pass_rate}",
          why="no rate lies between the two", fix="write the lower one first, such as [0.1, 0.9]"),
    warning("@band_is_beyond_rates",
            says="data.curriculum.pass_rate is {data.curriculum.pass_rate}",
            why="the mean of rewards from 0 to 1 lies between 0 and 1, so that what is always or "
            "never solved does not rest",
            fix="data.curriculum.pass_rate = [0, 1] | leave it where rewards have another range"),
    warning("data.curriculum.pass_rate", "rollout.n_samples_per_prompt = 1",
            why="the rate of a single sample is its reward, so that prompts rest by chance",
            fix="raise rollout.n_samples_per_prompt | remove data.curriculum.pass_rate"),
    *(unused("rollout.(max_aborted_count|mask_off_policy_tokens)", since, given=given,
             why="no sample is interrupted by a change of weights", instead=instead)
      for since, given, instead in (
          ("rollout.oversample_prompts = 0", ("not pipeline.max_staleness",),
           "set rollout.oversample_prompts"),
          ("pipeline.in_flight = finish", ("pipeline.max_staleness",),
           "pipeline.in_flight = pause"))),
    warning("rollout.max_aborted_count >= pipeline.max_staleness",
            given=("pipeline.max_staleness", "pipeline.in_flight != finish"),
            why="it has no effect, since no sample lives through more changes of weights than that",
            fix="remove rollout.max_aborted_count | set it below {pipeline.max_staleness}"),
    warning("rollout.oversample_prompts", "rollout.max_aborted_count = 0",
            why="every sample is waited for, which saves no time",
            fix="raise rollout.max_aborted_count | leave it unset"),
    warning("rollout.oversample_prompts > rollout.prompts_per_step",
            why="most samples will be several steps old when they are trained on",
            fix="use a quarter to a half of rollout.prompts_per_step, which is usual"),
)  # fmt: skip
