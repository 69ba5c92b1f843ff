"""How large the code is: files, lines by kind, keys, and the largest files of each package.

    python benchmarks/size.py              # `make size`
    python benchmarks/size.py --files 20   # and the largest files

A line counts as docstring or comment where nothing else stands on it; the rest that is not blank is
code.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

from hone.config import schema
from hone.config.tree import RLConfig

ROOT = Path(__file__).resolve().parent.parent


def lines_by_kind(text: str) -> Counter[str]:
    """The lines of a Python file: code, docstring, comment, blank; and their total."""
    docstrings = {
        number
        for node in ast.walk(ast.parse(text))
        if isinstance(body := getattr(node, "body", None), list)
        for statement in body
        if isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
        for number in range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
    }
    comments = {
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#")
    }
    lines = text.splitlines()
    kinds = Counter(lines=len(lines), files=1)
    for number, line in enumerate(lines, 1):
        if number in docstrings:
            kinds["docstring"] += 1
        elif number in comments:
            kinds["comment"] += 1
        elif line.strip():
            kinds["code"] += 1
        else:
            kinds["blank"] += 1
    return kinds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--files", type=int, default=0, help="how many of the largest files to list"
    )
    num_shown: int = parser.parse_args().files
    sizes = {
        path.relative_to(ROOT): lines_by_kind(path.read_text())
        for folder in ("src/hone", "tests")
        for path in sorted((ROOT / folder).rglob("*.py"))
    }
    columns = ("files", "lines", "code", "docstring", "comment", "blank")
    packages: dict[str, Counter[str]] = {}
    for path, kinds in sizes.items():
        top = path.parts[0]
        packages.setdefault(f"{top}, in all", Counter()).update(kinds)
        if top == "src":
            packages.setdefault("/".join(path.parts[1:3]), Counter()).update(kinds)
    print(f"{'':32}" + "".join(f"{column:>10}" for column in columns))
    for name, kinds in sorted(packages.items(), key=lambda item: -item[1]["lines"]):
        print(f"{name:32}" + "".join(f"{kinds[column]:>10,}" for column in columns))
    for path, kinds in sorted(sizes.items(), key=lambda item: -item[1]["lines"])[:num_shown]:
        print(f"{kinds['lines']:>7,}  {path}")
    print(f"\nkeys of the rl tree: {len(list(schema.fields(RLConfig)))}")


if __name__ == "__main__":
    main()
