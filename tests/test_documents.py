"""What the documents point to exists: tests by name, files and folders by path."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
DOCUMENTS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_tests_that_are_named_exist(document: Path) -> None:
    for path, name in re.findall(r"`(tests/[\w/.]+\.py)::(\w+)", document.read_text(encoding="utf-8")):
        assert f"def {name}(" in (REPOSITORY / path).read_text(encoding="utf-8"), f"{path}::{name}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_named_exist(document: Path) -> None:
    named = re.findall(r"\b(?:benchmarks|examples|docs|docker|tests)/[\w/.-]*\w", document.read_text(encoding="utf-8"))
    assert [name for name in named if not (REPOSITORY / name).exists()] == []
