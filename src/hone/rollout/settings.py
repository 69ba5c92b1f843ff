"""Settings of sampling, of the order of sampling and training, and of environments."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from hone.config.base import Section

__all__ = [
    "EnvConfig",
    "FilteredSamplingConfig",
    "GenerationConfig",
    "HarnessConfig",
    "PipelineConfig",
    "RolloutConfig",
    "SamplingConfig",
    "Stop",
    "ToolFormatName",
]

Stop = tuple[str | int, ...]
ToolFormatName = Literal[
    "auto",
    "apertus",
    "cohere",
    "deepseek_v3",
    "deepseek_v32",
    "ernie45",
    "functiongemma",
    "gemma4",
    "glm45",
    "granite",
    "harmony",
    "hermes",
    "hunyuan",
    "internlm",
    "kimi_k2",
    "lfm2",
    "llama3_json",
    "longcat",
    "minimax_m2",
    "mistral",
    "nemotron",
    "olmo3",
    "phi4",
    "pythonic",
    "qwen3_coder",
    "step3",
    "xlam",
]
"""`auto`, and the names of `hone.envs.tools.formats.registry.FORMATS`."""


class SamplingConfig(Section):
    """How completions are drawn."""

    max_completion_tokens: int = Field(default=1024, ge=1)
    """Longest completion, in tokens."""

    temperature: float = Field(default=1.0, ge=0)
    """Divisor of the logits; 0 is greedy."""


class FilteredSamplingConfig(SamplingConfig):
    """How completions are drawn that nothing is trained on: unlikely tokens may be left out."""

    top_p: float = Field(default=1.0, gt=0, le=1)
    """Smallest set of tokens whose probability reaches this much; 1 keeps all."""

    top_k: int = Field(default=0, ge=0)
    """Number of most probable tokens kept; 0 keeps all."""

    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Drop tokens less probable than this share of the most probable one; 0 keeps all."""


class GenerationConfig(FilteredSamplingConfig):
    """How completions are drawn, and what ends them."""

    stop: Stop = ()
    """Texts and token ids that end a completion, besides the model's own end-of-sequence ids."""


class RolloutConfig(SamplingConfig):
    """What one training step samples. There is no top_p and no top_k: tokens are drawn from the
    whole distribution, which is the one that the trainer scores."""

    stop: Stop = ()
    """Texts and token ids that end a completion, besides the model's own end-of-sequence ids; in
    evaluations too."""

    prompts_per_step: int = Field(default=64, ge=1)
    """Prompts (groups) sampled in a step, over all devices."""

    n_samples_per_prompt: int = Field(default=8, ge=1)
    """Group size: samples drawn for each prompt."""

    dynamic_sampling: bool = False
    """Drop groups whose samples all earn the same reward and sample other prompts instead (DAPO,
    arXiv:2503.14476). After ten rounds of further prompts a step goes on with fewer."""

    reward_range: tuple[float, float] | None = None
    """With `dynamic_sampling`, also drop groups whose mean reward does not lie between these two:
    [0.1, 0.9] of rewards from 0 to 1 leaves out what is nearly solved and what is nearly
    hopeless."""

    oversample_prompts: int = Field(default=0, ge=0)
    """Further prompts started in a step; once `prompts_per_step` groups are complete, what is
    unfinished is carried over to the next step as partial rollouts."""

    max_aborted_count: int | None = Field(default=None, ge=0)
    """Changes of weights that may interrupt a sample. One that was interrupted so often is left to
    finish: the step waits for it, or where sampling runs ahead the next change does, whatever
    `pipeline.in_flight`. Unset: no limit (`pipeline.max_staleness` is one too)."""

    mask_off_policy_tokens: bool = False
    """Of a sample that a change of weights has interrupted, train only on the tokens since the last
    one: those of older weights than its newest token are masked. A sample of one version is
    trained whole however old it is, and the newest tokens of another may be old as well:
    `algorithm.correction` is for those."""

    truncated_samples: Literal["train", "mask"] = "train"
    """Samples cut at the length limit: trained on, or kept in the baseline but out of the loss
    (DAPO's overlong filter). To penalise them use the `overlong` reward."""


class PipelineConfig(Section):
    """Asynchronous training: engines go on sampling while the trainer trains."""

    max_staleness: int = Field(default=0, ge=0)
    """Updates that may lie between the weights that began a sample and the update it is trained in:
    a hard bound, and so many batches are started ahead. An update waits for the samples that would
    exceed it, so that each prompt is trained once, however long its answers are. 0: sampling and
    training take turns. Above 0 they overlap; the engines are those of `cluster.num_engines`, or
    where that is 0, on a CPU, one in a thread of the first training process, with a copy of the
    weights. Start with 1; raise it while training waits for samples, lower it where the loss is
    unstable."""

    in_flight: Literal["pause", "abort", "finish"] = "pause"
    """Unfinished samples at a change of weights. `pause`: they keep their keys and values and go on
    under the new weights; a prompt that is half computed starts again. `abort`: they are put back
    with their tokens, whose keys and values are computed anew. `finish`: they end under their own
    weights, and the change waits for them."""

    @property
    def samples_ahead(self) -> bool:
        """Whether engines sample while the trainer trains."""
        return self.max_staleness > 0

    @property
    def resumes_samples(self) -> bool:
        """Whether samples may go on under other weights than those that began them."""
        return self.samples_ahead and self.in_flight != "finish"


class HarnessConfig(Section):
    """A program that plays an episode by itself, and asks the policy over HTTP for each turn."""

    command: str | None = None
    """Command of a program that plays one episode, such as `python agent.py`; it is split as a
    shell does, and no shell runs it. The program finds the policy at OPENAI_BASE_URL with
    OPENAI_API_KEY (or ANTHROPIC_BASE_URL with ANTHROPIC_API_KEY), and its task as JSON on its
    standard input. The last line that it prints may be the score; else `reward.functions` score the
    episode. Each episode is a process of its own, in the workers of reward functions, and may take
    the address space of `reward.memory_limit_gib`; a program that runs on Node.js needs 16."""


class EnvConfig(Section):
    """The environment of an episode: tools, simulated users, games. Unset, a sample is one turn,
    scored by `reward.functions`."""

    path: str | None = None
    """Class whose method `step` answers each turn of the policy, with a text that goes before it or
    with the reward that ends the episode: `path/to/file.py:Class` or `package.module:Class`. It
    runs in the workers of reward functions, within `reward.memory_limit_gib`, and
    `reward.timeout_s` or, with `start` and `step` for a live object of each episode,
    `env.turn_timeout_s`. `reward.functions` score the episodes that it ends without a reward, and
    no others. Environments of other frameworks: docs/environments.md."""

    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments that the class is made with: once in each worker, a session for each
    episode."""

    max_turns: int = Field(default=8, ge=1)
    """Most turns of the policy in an episode. All of them, and what the environment says between
    them, share the longest completion."""

    max_turn_tokens: int | None = Field(default=None, ge=1)
    """Longest turn, in tokens. Unset: what is left of the longest completion, so that one turn may
    use up the tokens of all others."""

    turn_timeout_s: float = Field(default=60.0, gt=0)
    """Deadline of one call of a session, in seconds; its worker is killed at it. An environment
    without sessions has `reward.timeout_s`."""

    episode_timeout_s: float = Field(default=600.0, gt=0)
    """Longest time from the start of a session, in seconds. After it the turn that is being sampled
    is the last one."""

    retries: int = Field(default=1, ge=0)
    """How often an episode is played again from its start, with the same seed, after its session
    has raised an error that another attempt may avoid, missed the deadline of a call, or lost its
    process. Then its sample has failed."""

    concurrency: int = Field(default=256, ge=1)
    """Most sessions that are open at a time, for each process that drives engines. Each has a
    worker process of its own; further episodes wait."""

    tools: tuple[str, ...] = ()
    """Tools that the policy may call: functions with types and a docstring, as
    `path/to/file.py:function` or `package.module:function`; servers of the Model Context Protocol,
    as `mcp:COMMAND ARGUMENTS` or `mcp:https://...`. The chat template shows them, and their answers
    are turns of the environment. Without `env.path`, a turn that calls no tool ends the episode,
    and `reward.functions` score it."""

    tool_format: ToolFormatName = "auto"
    """How the model writes calls of tools. `auto`: as its chat template shows."""

    max_tool_calls: int | None = Field(default=None, ge=1)
    """Most calls of tools that are run in an episode; further ones are answered with an error.
    Unset: no limit."""

    max_parallel_calls: int = Field(default=8, ge=1)
    """Most calls of tools that are run in one turn, all at the same time; further ones are answered
    with an error."""

    max_observation_tokens: int = Field(default=1024, ge=1)
    """Longest message of the environment, such as the answer of a tool, in tokens. A longer one
    loses its middle, and says how much."""

    harness: HarnessConfig = Field(default_factory=HarnessConfig)

    history: Literal["linear", "tree"] = "linear"
    """What a request of `env.harness.command` does that does not extend the turn before it, as
    where a program shortens its history or asks two things at once. `linear`: it is refused, and
    the sample fails. `tree`: it opens a branch, which becomes a row of its own."""

    @property
    def is_set(self) -> bool:
        """Whether episodes have an environment."""
        return self.path is not None or bool(self.tools) or self.harness.command is not None
