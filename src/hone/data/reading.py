"""Prompts of `hone generate`, read and rendered on demand, a block of rows at a time."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

from hone.data.chat import Renderer
from hone.data.columns import ExampleReader
from hone.data.filters import FilterReport
from hone.data.images import open_images
from hone.data.prompts import make_prompt, show_first
from hone.data.row_filters import InFileOrder, Sieve, load_filter, passing, split
from hone.data.settings import DataConfig
from hone.data.sources import SourceRow, count_rows, iter_source, source_names
from hone.data.split import is_held_out
from hone.data.tool_schemas import ToolSchemas
from hone.errors import UserError
from hone.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hone.images.reader import ImageReader

__all__ = ["num_rows", "read_prompts"]

_log = logging.getLogger(__name__)

BLOCK_ROWS = 256


def read_prompts(
    cfg: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    max_prompt_tokens: int,
    keeps_messages: bool = False,
    tools: ToolSchemas = (),
    images: ImageReader | None = None,
) -> Iterator[Prompt]:
    """The prompts of `data.train` in the order of its files, without those that `eval_fraction`
    holds out and those longer than `max_prompt_tokens` or `data.max_prompt_tokens`.

    The columns of a source are chosen from its first block of rows. `keeps_messages`, `tools` and
    `images` are those of `Renderer`. Raises UserError for anything wrong with the data when it
    reads that row.
    """
    renderer = Renderer(tokenizer, cfg, keeps_messages=keeps_messages, tools=tools, images=images)
    limit = min(max_prompt_tokens, cfg.max_prompt_tokens)
    fraction = 0.0 if cfg.eval else cfg.eval_fraction
    keep = load_filter(cfg.filter)
    is_shown = False
    for source, name in zip(cfg.train, source_names(cfg.train), strict=True):
        num_read = num_kept = num_long = 0
        report = FilterReport()
        read: ExampleReader | None = None
        in_order: InFileOrder | None = None
        for block in _blocks(iter_source(source)):
            numbers = range(num_read, num_read + len(block))
            num_read += len(block)
            rows, numbers = split(block, numbers, passing(keep, block), report)
            if not rows:
                continue
            read = read or ExampleReader.of_first(rows, source, name)
            in_order = in_order or InFileOrder(Sieve(cfg, read, None))
            examples = read(*in_order.kept(rows, numbers, report))
            examples = open_images(examples, images, cfg, report)
            for example, rendered in zip(
                examples, renderer.prompts(examples, max_tokens=limit), strict=True
            ):
                if is_held_out(rendered, seed=seed, fraction=fraction):
                    continue
                if len(rendered.token_ids) <= limit:
                    num_kept += 1
                    prompt = make_prompt(example, rendered)
                    if not is_shown:
                        is_shown = True
                        show_first(prompt, renderer, cfg)
                    yield prompt
                elif cfg.overlong_prompts == "error":
                    raise UserError(
                        f"{example.location}: {len(rendered.token_ids)} tokens or more, but there "
                        f"is room for {limit}; raise the limit data.max_prompt_tokens, shorten the "
                        "row, or set data.overlong_prompts to 'drop'"
                    )
                else:
                    num_long += 1
        summary = f"{source.path}: {num_kept:,} of {num_read:,} rows kept"
        if num_long:
            summary += f"; {num_long:,} dropped as too long, of more than {limit} tokens"
        summary = "; ".join([summary, *report.skipped_in_words])
        if report.unreadable:
            summary += (
                f"; {len(report.unreadable):,} dropped for an image, the first: "
                f"{report.unreadable[0]}"
            )
        if not num_kept:
            raise UserError(
                f"{summary}. Raise data.max_prompt_tokens, or lower data.eval_fraction."
            )
        is_short = num_long or report.has_dropped
        _log.log(logging.WARNING if is_short else logging.INFO, "%s", summary)


def num_rows(cfg: DataConfig) -> int:
    """The number of rows of `data.train`, including those that are not kept."""
    return sum(map(count_rows, cfg.train))


def _blocks(rows: Iterator[SourceRow]) -> Iterator[list[SourceRow]]:
    while block := list(islice(rows, BLOCK_ROWS)):
        yield block
