"""Count lines of code and of documentation, by package, and files per folder.

    python benchmarks/source_lines.py [FOLDER]     # default: this checkout

A line of code has at least one token that is neither a comment nor part of a docstring. Generated stubs are left out.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

PACKAGES = ("edit", "peers", "aggregator", "proto/editpb", "tests")


def docstring_lines(text: str) -> set[int]:
    """Numbers of the lines that docstrings of modules, classes, functions and attributes take."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        for child in getattr(node, "body", []) if isinstance(getattr(node, "body", None), list) else []:
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant) and isinstance(child.value.value, str):
                lines.update(range(child.lineno, (child.end_lineno or child.lineno) + 1))
    return lines


def count(path: Path) -> Counter[str]:
    text = path.read_text(encoding="utf-8")
    documented = docstring_lines(text)
    code: set[int] = set()
    comments: set[int] = set()
    skipped = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.ENCODING)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in skipped:
            code.update(set(range(token.start[0], token.end[0] + 1)) - documented)
    return Counter(files=1, lines=text.count("\n"), code=len(code), docs=len(documented | (comments - code)))


def main() -> None:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1]
    print(f"{'':14} {'files':>6} {'lines':>7} {'code':>7} {'documentation':>14}")
    source, folders = Counter[str](), Counter[str]()
    for package in PACKAGES:
        total = Counter[str]()
        for path in sorted((root / package).rglob("*.py")):
            if "_pb2" not in path.name and ".venv" not in path.parts:
                total += count(path)
                if package != "tests":
                    folders[str(path.parent.relative_to(root))] += 1
        if package != "tests":
            source += total
        print(f"{package:14} {total['files']:6} {total['lines']:7} {total['code']:7} {total['docs']:14}")
    print(f"{'all but tests':14} {source['files']:6} {source['lines']:7} {source['code']:7} {source['docs']:14}")
    print("most files in a folder:", ", ".join(f"{folder} {files}" for folder, files in folders.most_common(6)))


if __name__ == "__main__":
    main()
