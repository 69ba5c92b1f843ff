"""Where prompts come from and how rows become prompts."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

from pydantic import Field

from hone.config.base import Section

__all__ = [
    "ColumnsConfig",
    "CurriculumConfig",
    "DataConfig",
    "PairColumnsConfig",
    "PairSourceBase",
    "PairSourceConfig",
    "ServedDataConfig",
    "SourceBase",
    "SourceConfig",
    "fill_template",
    "template_fields",
]

_MAX_IMAGE_TOKENS = Field(
    default=768,
    ge=1,
    description="Most tokens of one image; a larger one is made smaller. Only for models that see "
    "images.",
)
_IMAGE_WORKERS = 2
_TEMPLATE_FIELD = re.compile(r"\{\{(\w+)\}\}|\{([A-Za-z_]\w*)\}")


def template_fields(template: str) -> list[str]:
    """The names that a template fills in: `{name}` is one, `{{name}}` gives `{name}`, and other
    braces, as in LaTeX, stay as they are."""
    return [match[2] for match in _TEMPLATE_FIELD.finditer(template) if match[2]]


def fill_template(template: str, value_of: Callable[[str], str]) -> str:
    """A template with `value_of` each name that it fills in."""
    return _TEMPLATE_FIELD.sub(
        lambda match: "{" + match[1] + "}" if match[1] else value_of(match[2]), template
    )


class ColumnsConfig(Section):
    """Names of the columns to read. Unset: found by the usual names, which an error lists; two that
    fit equally well are an error too."""

    prompt: str | None = None
    """Question as text, or a list of chat messages. Usual names: prompt, messages, question,
    problem, input, instruction."""

    answer: str | None = None
    """Ground truth handed to the rewards; of `hone sft` the demonstration to imitate. Usual names:
    `reward_model.ground_truth`, answer, ground_truth, solution, label, target; of a demonstration
    completion, response, output, or the last message of `messages`."""

    task: str | None = None
    """Column that routes rewards and names metrics. Usual names: task, data_source,
    datasource."""

    images: str | None = None
    """Images of the prompt, a list or a single one: paths, bytes, data URIs, objects with `bytes`
    and `path`. Usual names: images, image. An empty name reads none."""

    difficulty: str | None = None
    """Column with a number by which the training rows of each epoch are ordered: the lowest first,
    equal ones in the order of `data.shuffle`. Only for sources that are read whole (see
    `data.shuffle_window`). Unset: the order of `data.shuffle`."""

    pass_rate: str | None = None
    """Column with the mean reward of each training prompt before the run, as `hone eval` measures
    it. `data.curriculum.pass_rate` uses it until the run has a reward of its own. Only for sources
    that are read whole (see `data.shuffle_window`). Unset: no prompt rests before it was drawn."""


class PairColumnsConfig(ColumnsConfig):
    """Names of the columns of preferences; unset, those of TRL."""

    chosen: str | None = None
    """The better completion: text, or chat messages. Usual name: chosen."""

    rejected: str | None = None
    """The worse completion. Usual name: rejected."""

    label: str | None = None
    """Whether a single completion, which is in `answer`'s column, is good. Usual name: label."""

    margin: str | None = None
    """By how much more than 0 the chosen one's reward should exceed the other's. Usual name:
    margin."""


class SourceBase(Section):
    """One data set: JSONL, Parquet, or anything the `datasets` library opens."""

    path: str
    """A `.jsonl`, `.json` or `.parquet` file (the first two also with `.gz`), a folder of them, a
    pattern (`shards/*.parquet`, `**` for any folders), either of these at a URL (`s3://`, `gs://`,
    `hf://`, `https://`), a data set saved by `datasets`, or a hub name."""

    split: str = "train"
    """Split to read from a hub or saved data set, or from a folder whose files are named after
    splits; ignored for single files and patterns."""

    subset: str | None = None
    """Configuration name of a hub data set."""

    max_rows: int | None = Field(default=None, ge=1)
    """Read only so many rows, the first ones. Unset: all."""

    columns: ColumnsConfig = ColumnsConfig()
    """Column mapping."""

    answer_pattern: str | None = None
    """Regular expression whose first group (or whole match) in the answer column is the ground
    truth; GSM8K: `####\\s*(.+)`. A row without a match has no answer (`data.missing_answers`)."""

    task: str | None = None
    """Task name for all rows of this source; unset: the task column, else the file's name."""


class SourceConfig(SourceBase):
    """One data set to train on."""

    weight: float = Field(default=1.0, gt=0)
    """Share of this source in the mix, relative to the others."""

    max_epochs: int | None = Field(default=None, ge=1)
    """Passes over the rows of this source, after which it ends and the others take over its share.
    Unset: without limit."""

    from_step: int = Field(default=1, ge=1)
    """First step for which rows of this source are drawn."""

    until_step: int | None = Field(default=None, ge=1)
    """Last step for which rows of this source are drawn; then the others take over its share.
    Unset: the last one of the run."""


class PairSourceBase(SourceBase):
    """One data set of preferences."""

    # Sections are frozen, so that a narrower type is sound.
    columns: PairColumnsConfig = PairColumnsConfig()  # pyright: ignore[reportIncompatibleVariableOverride]
    """Column mapping."""


class PairSourceConfig(PairSourceBase, SourceConfig):  # pyright: ignore[reportIncompatibleVariableOverride]
    """One data set of preferences to train on."""


class CurriculumConfig(Section):
    """Which prompts are skipped for some epochs, by the mean reward of their last group."""

    pass_rate: tuple[float, float] | None = None
    """Lowest and highest mean reward of a prompt, both exclusive. A prompt outside of them rests:
    it is skipped for some epochs, and nothing is generated for it. With rewards of 0 and 1, [0, 1]
    lets prompts rest that are always or never solved. Unset: none rests."""

    rest_epochs: int = Field(default=5, ge=1)
    """Mean number of epochs after which a prompt that rests is tried again. For each prompt it is
    drawn at random from 1 to 2 * `rest_epochs` - 1, so that prompts that began to rest together do
    not come back together."""


class DataConfig(Section):
    """Training and evaluation data."""

    train: tuple[SourceConfig, ...]
    """Sources to train on, mixed by their weights."""

    eval: tuple[SourceBase, ...] = ()
    """Sources to evaluate on. Empty: rows are held out of `train`, see `eval_fraction`."""

    eval_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Share of the training prompts held out for evaluation when `eval` is empty, each with all
    rows that repeat it."""

    max_eval_rows: int = Field(default=512, ge=1)
    """Most evaluation rows from a source that is not read whole: the first ones of its files that
    `eval_fraction` holds out. The others that it holds out are not used at all."""

    shuffle: bool = True
    """Draw each epoch's order from `run.seed`; off: file order."""

    shuffle_window: int | None = Field(default=None, ge=1)
    """Most rows that are shuffled together. Where set, every source of `train` is read while the
    run draws from it: its blocks (row groups of Parquet, about 1 MiB of JSON lines) come in random
    order, and the rows of as many blocks as hold so many rows are shuffled together. Unset: a
    source of up to 50,000 rows and 64 MiB is read whole before the run and shuffled whole; a larger
    one is read while the run draws from it, in windows of 65,536 rows or 16 MiB."""

    chat: Literal["auto", "always", "never"] = "auto"
    """Render prompts through the chat template. `auto`: where the tokenizer has one."""

    system_prompt: str | None = None
    """System message put before every chat prompt."""

    prompt_template: str = "{prompt}"
    """Text around a plain-text prompt; `{prompt}` and any other column may be named. Beside chat
    messages it is an error."""

    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Longest prompt, in tokens, after rendering."""

    overlong_prompts: Literal["drop", "error"] = "drop"
    """What happens to longer prompts: dropped and counted, or an error naming the row."""

    filter: str | None = None
    """The user's own function, `path/to/file.py:function` or `package.module:function`. It gets
    each row before it is rendered, as a dict of its columns, and returns True for those to use;
    others are left out and counted. It must return the same each time. Unset: all rows are used."""

    missing_answers: Literal["error", "drop"] = "error"
    """What happens to rows without an answer, or in which `answer_pattern` finds none: an error
    naming the row, or dropped and counted. In demonstrations and preferences the completions are
    the answers. With drop, blank text counts as no answer too."""

    duplicates: Literal["keep", "drop"] = "keep"
    """What happens to a row with the content of an earlier row of its source: kept, or dropped and
    counted. Content is what the run reads of a row: prompt, answer or completions, task, images.
    Of a source that is read whole the first such row in its files is used, of others the first one
    in the order of each epoch."""

    max_image_tokens: int = _MAX_IMAGE_TOKENS

    image_errors: Literal["error", "drop"] = "error"
    """What happens to rows with an image that cannot be read: an error naming the row, or dropped
    and counted."""

    image_urls: bool = False
    """Fetch images that are given as URLs. Off: such a row has an image that cannot be read."""

    image_workers: int = Field(default=_IMAGE_WORKERS, ge=0)
    """Processes of each trainer process that decode and resize images, as Relax's
    `--mm-processor-pool-size`; they start with the first image. 0: the trainer process does it
    itself, while everything else in it waits."""

    @property
    def held_out_fraction(self) -> float:
        """Share of the training prompts that are for evaluation, 0 where `eval` names sources."""
        return 0.0 if self.eval else self.eval_fraction


class ServedDataConfig(Section):
    """The images of requests, which are read as those of a run are."""

    max_image_tokens: int = _MAX_IMAGE_TOKENS

    image_workers: int = Field(default=_IMAGE_WORKERS, ge=0)
    """Processes that decode and resize the images of requests; they start with the first image. 0:
    the process of the server does it itself, in a thread."""
