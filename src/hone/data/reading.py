"""Prompts of `hone generate`, read and rendered on demand, a block of rows at a time.

    row number ─► index ─► rows from there on ─► examples ─► rendered ─► kept, or dropped

Rows are numbered from 0 over all sources, in the order of the files, whether they are kept or not.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from hone.data.chat import Renderer
from hone.data.columns import ExampleReader
from hone.data.filters import FilterReport, too_long
from hone.data.images import open_images
from hone.data.index import SourceIndex
from hone.data.prompts import make_prompt, prompt_limit, show_first
from hone.data.row_filters import (
    InFileOrder,
    Sieve,
    first_wanted,
    load_filter,
    passing,
    split,
    wanted,
)
from hone.data.settings import DataConfig
from hone.data.sources import SourceRow, source_names
from hone.data.split import is_held_out
from hone.data.tool_schemas import ToolSchemas
from hone.errors import UserError
from hone.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hone.images.reader import ImageReader

__all__ = ["PromptReader"]

_log = logging.getLogger(__name__)

BLOCK_ROWS = 256


class PromptReader:
    """The prompts of `data.train` in the order of its files, without those that `eval_fraction`
    holds out and those longer than `max_prompt_tokens` or `data.max_prompt_tokens`."""

    def __init__(
        self,
        cfg: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        seed: int,
        max_prompt_tokens: int,
        keeps_messages: bool = False,
        tools: ToolSchemas = (),
        images: ImageReader | None = None,
        cache: Path | None = None,
        must_be_same: bool = False,
    ) -> None:
        """Index the sources. `cache` is a folder for their indexes; with `must_be_same` the files
        must be as they were when these were kept. `keeps_messages`, `tools` and `images` are those
        of `Renderer`. Raises UserError.
        """
        self._cfg, self._images, self._seed = cfg, images, seed
        self._renderer = Renderer(
            tokenizer, cfg, keeps_messages=keeps_messages, tools=tools, images=images
        )
        self._limit = prompt_limit(cfg, max_prompt_tokens)
        self._keep = load_filter(cfg.filter)
        self._indexes = [
            SourceIndex.to_walk(source, cache, must_be_same=must_be_same) for source in cfg.train
        ]
        self._is_shown = False

    @property
    def num_rows(self) -> int:
        """Rows of all sources, including those that are not kept."""
        return sum(index.num_rows for index in self._indexes)

    def read(self, start: int = 0) -> Iterator[tuple[int, Prompt]]:
        """The prompts with the numbers of their rows, from the row `start` on, which is 0 or that
        of a prompt that was kept.

        The columns of a source are chosen from its first block of rows. What else lies before the
        row is not read, but for its digests with `data.duplicates` drop. Raises UserError for
        anything wrong with the data when it reads that row.
        """
        num_before = 0
        for index, name in zip(self._indexes, source_names(self._cfg.train), strict=True):
            first = max(0, start - num_before)
            if first < index.num_rows:
                for number, prompt in self._read(index, name, first):
                    yield num_before + number, prompt
            num_before += index.num_rows

    def _read(self, index: SourceIndex, name: str, first: int) -> Iterator[tuple[int, Prompt]]:
        """The prompts of a source with the numbers of their rows in it, from row `first` on."""
        source, cfg = index.source, self._cfg
        num_read, num_kept, num_long = first, 0, 0
        report = FilterReport()
        begun = self._begun(index, name, first) if first else None
        for block in _blocks(index.walk(first)):
            numbers = range(num_read, num_read + len(block))
            num_read = numbers.stop
            rows, numbers = split(block, numbers, passing(self._keep, block), report)
            if not rows:
                continue
            if begun is None:
                read = ExampleReader.of_first(rows, source, name)
                begun = read, InFileOrder(Sieve(cfg, read, None))
            read, in_order = begun
            rows, numbers = in_order.kept(rows, numbers, report)
            examples = read(rows, numbers)
            number_of = {example.id: n for n, example in zip(numbers, examples, strict=True)}
            examples = open_images(examples, self._images, cfg, report)
            rendered = self._renderer.prompts(examples, max_tokens=self._limit.max_tokens)
            for example, row in zip(examples, rendered, strict=True):
                if is_held_out(row, seed=self._seed, fraction=cfg.held_out_fraction):
                    continue
                if too_long(example, row, [self._limit], overlong=cfg.overlong_prompts):
                    num_long += 1
                    continue
                num_kept += 1
                prompt = make_prompt(example, row)
                if not self._is_shown:
                    self._is_shown = True
                    show_first(prompt, self._renderer, cfg)
                yield number_of[example.id], prompt
        summary = f"{source.path}: {num_kept:,} of {num_read - first:,} rows kept"
        if first:
            summary += f", from row {first + 1:,} on"
        if num_long:
            summary += f"; {num_long:,} dropped as too long: {self._limit}"
        summary = "; ".join([summary, *report.skipped_in_words])
        if report.unreadable:
            summary += (
                f"; {len(report.unreadable):,} dropped for an image, the first: "
                f"{report.unreadable[0]}"
            )
        if not num_kept:
            raise UserError(
                f"{summary}. Raise data.max_prompt_tokens, lower data.eval_fraction, or change "
                "what drops the rows; `hone data check` shows each of them"
            )
        is_short = num_long or report.has_dropped
        _log.log(logging.WARNING if is_short else logging.INFO, "%s", summary)

    def _begun(
        self, index: SourceIndex, name: str, first: int
    ) -> tuple[ExampleReader, InFileOrder]:
        """The reader of a source and its filters, as they are before the row `first`."""
        # The row `first` was wanted, so that there is one.
        head = first_wanted(self._keep, _blocks(index.walk()), FilterReport())
        read = ExampleReader.of_first(head, index.source, name)
        sieve = Sieve(self._cfg, read, None)
        # From these it knows the kinds of values.
        read(*InFileOrder(sieve).kept(head, range(len(head)), FilterReport()))
        in_order = InFileOrder(sieve)
        if sieve.drops_duplicates:
            for block in _blocks(islice(index.walk(), first)):
                in_order.learn(wanted(self._keep, block))
        return read, in_order


def _blocks(rows: Iterator[SourceRow]) -> Iterator[list[SourceRow]]:
    while block := list(islice(rows, BLOCK_ROWS)):
        yield block
