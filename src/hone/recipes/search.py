"""The environment of the recipe `search-rl`: text files, with a search over their passages.

Its public methods are tools, as those of an environment of TRL are:

    env:
      path: hone.recipes.search:Documents
      args: {folder: my_documents, limit: 3}
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

__all__ = ["Documents", "Index"]

SATURATION, LENGTH_SHARE = 1.2, 0.75
"""`k1` and `b` of BM25: how soon a repeated word stops to count, and how much the length of a
passage does."""
TITLE_WEIGHT = 3
"""How often the words of a document's name count in each of its passages."""


class Documents:
    """A folder of text files (`*.txt`), which the policy searches and reads. What it says in the
    end is scored by `reward.functions`."""

    def __init__(self, folder: str, limit: int = 3) -> None:
        """`limit` is the number of passages that a search finds.

        Raises ValueError where the folder has no text file."""
        self._index = _index(Path(folder).resolve())
        self._limit = limit

    def reset(self, **columns: object) -> None:
        """Every row has the same documents."""

    def search(self, query: str) -> str:
        """Find passages of documents.

        Args:
            query: Words to look for
        """
        found = self._index.search(query, self._limit)
        return "\n".join(f"{name}: {text}" for name, text in found) or "nothing found"

    def read(self, name: str) -> str:
        """Read a document.

        Args:
            name: The name of the document, which stands before each passage that was found
        """
        return self._index.read(name)


class Index:
    """Passages of documents, ranked by Okapi BM25 (Robertson and Zaragoza, 2009,
    https://doi.org/10.1561/1500000019)."""

    def __init__(self, documents: dict[str, str]) -> None:
        """`documents` are texts by name. Blank lines divide them into passages."""
        self._documents = documents
        self._passages = [
            (name, passage)
            for name, text in documents.items()
            for passage in re.split(r"\n\s*\n", text.strip())
        ]
        self._counts = [
            Counter(_words(name) * TITLE_WEIGHT + _words(text)) for name, text in self._passages
        ]
        self._mean_length = sum(c.total() for c in self._counts) / max(1, len(self._counts))
        self._places: dict[str, list[int]] = {}
        for place, counts in enumerate(self._counts):
            for word in counts:
                self._places.setdefault(word, []).append(place)

    def search(self, query: str, limit: int) -> list[tuple[str, str]]:
        """The best passages of those with a word of the query, each with its document's name.
        Among equal ones the earlier one comes first."""
        scores: defaultdict[int, float] = defaultdict(float)
        for word in set(_words(query)):
            places = self._places.get(word, [])
            rarity = math.log(1 + (len(self._counts) - len(places) + 0.5) / (len(places) + 0.5))
            for place in places:
                count, length = self._counts[place][word], self._counts[place].total()
                norm = 1 - LENGTH_SHARE + LENGTH_SHARE * length / self._mean_length
                gain = count * (SATURATION + 1) / (count + SATURATION * norm)
                scores[place] += rarity * gain
        best = sorted(scores, key=lambda place: (-scores[place], place))
        return [self._passages[place] for place in best[:limit]]

    def read(self, name: str) -> str:
        """The text of a document. Raises KeyError where there is none of this name."""
        if name not in self._documents:
            raise KeyError(f"there is no document '{name}'; search for one")
        return self._documents[name]


@cache
def _index(folder: Path) -> Index:
    """The index of a folder, made once in each worker. The path is absolute: a relative one names
    another folder once the worker's current folder is another."""
    files = sorted(folder.rglob("*.txt"))
    if not files:
        raise ValueError(f"there is no text file (*.txt) in '{folder}'; name a folder of documents")
    return Index(
        {
            str(file.relative_to(folder).with_suffix("")): file.read_text(encoding="utf-8").strip()
            for file in files
        }
    )


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
