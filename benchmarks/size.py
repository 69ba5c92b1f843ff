"""How large the code is: files, lines by kind, keys, what `examples/loop.py` loads of it, and the
largest files of each package.

    python benchmarks/size.py              # `make size`
    python benchmarks/size.py --files 20   # and the largest files

A line counts as docstring or comment where nothing else stands on it; the rest that is not blank is
code.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

from hone.config import schema
from hone.config.tree import RLConfig

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "loop.py"
_LOAD = """
import ast, json, pathlib, sys
import hone
for node in ast.walk(ast.parse(pathlib.Path(sys.argv[1]).read_text())):
    if isinstance(node, ast.Attribute) and getattr(node.value, "id", None) == "hone":
        getattr(hone, node.attr)
files = [getattr(m, "__file__", None) for n, m in sys.modules.items() if n.split(".")[0] == "hone"]
print(json.dumps([file for file in files if file]))
"""


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


def loaded_by_example() -> Counter[str]:
    """The lines of each package, by its name, that the names of hone in `examples/loop.py` load in
    a fresh interpreter, and under `files` the number of modules."""
    command = [sys.executable, "-c", _LOAD, str(EXAMPLE)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = Counter[str]()
    for file in map(Path, json.loads(done.stdout)):
        package = file.relative_to(ROOT / "src").parts[1].removesuffix(".py")
        loaded[package] += len(file.read_text().splitlines())
        loaded["files"] += 1
    return loaded


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
    loaded = loaded_by_example()
    num_modules = loaded.pop("files")
    most = ", ".join(f"{name} {lines:,}" for name, lines in loaded.most_common(6))
    print(f"examples/loop.py loads {num_modules} modules, {loaded.total():,} lines: {most} ...")


if __name__ == "__main__":
    main()
