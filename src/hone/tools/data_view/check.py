"""`hone data check`: every row as a run would read it, and what a run would refuse or drop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hone.address import names_code
from hone.config.tree import SFTConfig
from hone.data.columns import Example
from hone.data.curriculum import ROLES
from hone.data.filters import REASONS, FilterReport
from hone.data.index import SourceIndex
from hone.data.loading import is_streamed, require_no_order
from hone.data.pairs import Compared, weak_pairs
from hone.data.settings import SourceBase, SourceConfig
from hone.data.split import is_held_out
from hone.errors import UserError
from hone.rewards.rules import columns_needed
from hone.tools.data_view.chosen import Viewed
from hone.tools.data_view.problems import MOST_SHOWN, Problems
from hone.tools.data_view.reading import (
    Item,
    Reader,
    attempt,
    blocks,
    read_in_passes,
    readers_of,
)
from hone.tools.data_view.text import Entry, Language, open_all

__all__ = ["Checked", "Dropped", "SourceChecked", "check"]

Tell = Callable[[int], None]


@dataclass(slots=True)
class Dropped:
    """Rows that a run drops for one reason."""

    reason: str
    number: int = 0
    told: list[str] = field(default_factory=list[str])
    """The first ones, each with its place."""

    def add(self, message: str) -> None:
        """Count a row."""
        self.number += 1
        if len(self.told) < MOST_SHOWN:
            self.told.append(message)


@dataclass(slots=True)
class SourceChecked:
    """What became of the rows of a source."""

    path: str
    key: str
    layout: str = ""
    roles: dict[str, str] = field(default_factory=dict[str, str])
    num_rows: int = 0
    num_kept: int = 0
    num_held_out: int = 0
    """Of those that are kept, for evaluation."""
    weak: Counter[str] = field(default_factory=Counter[str])
    """Rows from which little can be learned, by what they have."""
    weak_first: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(slots=True)
class Checked:
    """What a run would say of its data."""

    unit: str
    note: str = ""
    sources: list[SourceChecked] = field(default_factory=list[SourceChecked])
    problems: Problems = field(default_factory=Problems)
    """What a run refuses."""
    dropped: dict[str, Dropped] = field(default_factory=dict[str, Dropped])
    warnings: list[str] = field(default_factory=list[str])
    longest: int = 0
    """The longest row that is kept, in the unit."""
    is_interrupted: bool = False

    @property
    def num_rows(self) -> int:
        return sum(source.num_rows for source in self.sources)

    @property
    def num_dropped(self) -> int:
        return sum(dropped.number for dropped in self.dropped.values())

    def drop(self, reason: str, message: str) -> None:
        """Count a row that a run drops."""
        self.dropped.setdefault(reason, Dropped(reason)).add(message)


def check(viewed: Viewed, language: Language, tell: Tell = lambda num_rows: None) -> Checked:
    """Read all rows of all sources. Ctrl-C ends it; what was found until then is returned."""
    checker = _Checker(viewed, language, tell)
    readers = readers_of(viewed.cfg, viewed.sources)
    if read_in_passes(readers, checker.begin, checker.read):
        checker.require_split()
    else:
        checker.checked.is_interrupted = True
    return checker.checked


class _Checker:
    """One pass over all sources, or several where rows say something else than the first ones."""

    def __init__(self, viewed: Viewed, language: Language, tell: Tell) -> None:
        self._data, self._seed = viewed.cfg.data, viewed.cfg.run.seed
        cfg = viewed.cfg
        self._needed = [] if isinstance(cfg, SFTConfig) else columns_needed(cfg.reward)
        self._language, self._tell = language, tell
        self.begin()

    def begin(self) -> None:
        """Forget what an earlier pass has found."""
        self.checked = Checked(self._language.unit, self._language.note)

    def read(self, reader: Reader) -> None:
        """Check the rows of a source."""
        checked, data = self.checked, self._data
        fraction = data.held_out_fraction
        source = SourceChecked(reader.source.path, reader.key)
        checked.sources.append(source)
        num_problems, shortest = len(checked.problems), (0, "")
        for block in blocks(reader, checked.problems):
            source.layout, source.roles = reader.layout, reader.roles
            source.num_rows += len(block.rows)
            for why in block.skipped:
                checked.drop(REASONS[why.reason].of_many, why.where)
            items = [item for _, items in block.read for item in items]
            self._weak(source, items)
            report = FilterReport()
            opened = open_all(items, self._language, checked.problems, report)
            for message in report.unreadable:
                checked.drop(REASONS["image"].of_many, message)
            done = attempt(opened, lambda some: self._language.render(some, True), checked.problems)
            last = ""
            for item, entry in done:
                goes_out = self._language.has_tokens and is_held_out(
                    entry, seed=self._seed, fraction=fraction
                )
                dropped = self._is_dropped(item, entry)
                if dropped is None:
                    # Two completions of a pair may be items of their own.
                    is_new = item.location != last
                    source.num_kept += is_new
                    source.num_held_out += goes_out and is_new
                    last = item.location
                elif not shortest[0] or dropped[0] < shortest[0]:
                    shortest = dropped
            self._tell(checked.num_rows)
        self._say_weak(reader, source)
        self._require_no_order(reader.source, source.num_rows)
        if source.num_rows and not source.num_kept and len(checked.problems) == num_problems:
            checked.problems.add(
                f"{source.path}: a run would have no row left. {shortest[1]}; raise the limit, or "
                "shorten the rows"
            )

    def _require_no_order(self, source: SourceBase, num_rows: int) -> None:
        """Refuse columns that say how rows are ordered where a run does not read all rows first."""
        if not (num_rows and isinstance(source, SourceConfig)):
            return
        if not any(getattr(source.columns, role) for role in ROLES):
            return
        try:
            if is_streamed(self._data, SourceIndex.build(source)):
                require_no_order(source)
        except UserError as error:
            self.checked.problems.add(f"{error}")

    def _is_dropped(self, item: Item, entry: Entry) -> tuple[int, str] | None:
        """The length of a row that a limit of the run drops, and a message; None for others."""
        checked, language = self.checked, self._language
        broken = next((x for x in language.limits if x.length(entry) > x.max_tokens), None)
        if broken is None:
            self._require_known(item, entry)
            self._require_columns(item)
            checked.longest = max(checked.longest, entry.num_whole)
            return None
        length = broken.length(entry)
        shown = f"at least {length}" if entry.is_cut else f"{length}"
        message = f"{item.location}: {shown} tokens, but {broken}"
        if self._data.overlong_prompts == "error":
            checked.problems.add(
                f"{message}; raise the limit, shorten the row, or set data.overlong_prompts to "
                "'drop'"
            )
        else:
            checked.drop(f"more tokens than {broken}", message)
        return length, message

    def _require_known(self, item: Item, entry: Entry) -> None:
        for text in entry.texts:
            if found := self._language.unknown(text.token_ids):
                self.checked.problems.add(
                    f"{item.location}: the row has {found}: its tokenizer has more. Name the "
                    "model's own in model.tokenizer, or leave such rows out"
                )
                return

    def _require_columns(self, item: Item) -> None:
        """Refuse a row without what a reward function asks for, as a run does."""
        if not isinstance(item, Example):
            return
        has = {name for name, value in item.metadata.items() if value is not None}
        for fn, name in self._needed:
            is_answer = name == "answer"
            if (item.answer is not None) if is_answer else (name in has):
                continue
            what = "the answer of each row" if is_answer else f"the column '{name}' of each row"
            default = ", or give the parameter a default" if names_code(fn) else ""
            self.checked.problems.add(
                f"{item.location}: '{fn}' needs {what} (here are: {', '.join(sorted(has))}); fill "
                f"it, take the row out{default}"
            )

    def _weak(self, source: SourceChecked, items: Sequence[Item]) -> None:
        """Count pairs from which little is learned."""
        for item in items:
            if isinstance(item, Compared):
                for problem in weak_pairs([item]):
                    what = problem.partition(" rows ")[2].partition(";")[0]
                    source.weak[what] += 1
                    source.weak_first.setdefault(what, item.location)

    def _say_weak(self, reader: Reader, source: SourceChecked) -> None:
        warnings = self.checked.warnings
        if reader.num_repeats and reader.repeats_prompt:
            warnings.append(
                f"{source.path}: the completions of all {reader.num_repeats:,} rows begin with the "
                "prompt, which is taken off them"
            )
        warnings += [
            f"{source.path}: {number:,} of the {source.num_rows:,} rows {what}; the first is "
            f"{source.weak_first[what]}"
            for what, number in source.weak.items()
        ]

    def require_split(self) -> None:
        """Problems of `data.eval_fraction`, as a run has them."""
        data, checked = self._data, self.checked
        if data.eval or not data.eval_fraction:
            return
        if not self._language.has_tokens:
            checked.warnings.append(
                "which rows data.eval_fraction holds out is not known without a model's tokens"
            )
            return
        key = f"data.eval_fraction = {data.eval_fraction}"
        for source in checked.sources:
            if source.num_kept and source.num_held_out == source.num_kept:
                checked.problems.add(
                    f"{key} leaves none of the {source.num_kept:,} rows of {source.path} for "
                    "training; lower it or name a data.eval source"
                )
        if checked.num_rows and not any(source.num_held_out for source in checked.sources):
            checked.problems.add(
                f"{key} holds out none of the rows; raise it or name a data.eval source"
            )
