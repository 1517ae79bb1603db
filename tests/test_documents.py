"""What the documents name exists: tests by name, files and folders by path; the tree in docs/architecture.md is complete."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
DOCUMENTS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
ARCHITECTURE = REPOSITORY / "docs" / "architecture.md"
FOLDERS = ("edit", "aggregator", "peers", "proto", "tests", "benchmarks", "examples", "docker", "docs")
SOURCE = ("edit", "aggregator", "peers", "proto")  # of these the tree names every file
UNLISTED = re.compile(r"__init__\.py|__main__\.py|py\.typed|.*_pb2(_grpc)?\.pyi?|.*\.html")


def files_of(folder: str) -> Iterator[Path]:
    """Relative to the repository, without caches."""
    for path in sorted((REPOSITORY / folder).rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc":
            yield path.relative_to(REPOSITORY)


def named_in_the_tree() -> list[str]:
    """Every path of the indented list in docs/architecture.md; a folder ends in a slash."""
    section = ARCHITECTURE.read_text(encoding="utf-8").split("## The tree", 1)[1]
    block = section.split("```", 2)[1].strip("\n")
    paths: list[str] = []
    above: list[str] = []
    for line in block.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        above[depth:] = [line.strip().split("  ", 1)[0]]
        paths.append("".join(above))
    return paths


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_tests_that_are_named_exist(document: Path) -> None:
    for path, name in re.findall(r"`(tests/[\w/.]+\.py)::(\w+)", document.read_text(encoding="utf-8")):
        assert f"def {name}(" in (REPOSITORY / path).read_text(encoding="utf-8"), f"{path}::{name}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_named_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    named = re.findall(rf"(?<![\w/.-])(?:{'|'.join(FOLDERS)})/[\w/.-]*\w", text)
    assert [name for name in named if not (REPOSITORY / name).exists()] == []


def test_files_that_the_architecture_names_by_their_last_part_exist() -> None:
    """`machine.py` after `edit/rounds/events.py` is some file of that name."""
    text = ARCHITECTURE.read_text(encoding="utf-8")
    known = [f"/{path.as_posix()}" for folder in (*SOURCE, "tests") for path in files_of(folder)]
    named = re.findall(r"`([\w/]+\.(?:py|proto|sh))`", text)
    assert len(named) > 50
    assert [name for name in named if not any(path.endswith(f"/{name}") for path in known)] == []


def test_the_tree_names_every_source_file_and_nothing_else() -> None:
    named = named_in_the_tree()
    assert [path for path in named if not (REPOSITORY / path).exists()] == [], "the tree names what is not there"
    files = [path for folder in SOURCE for path in files_of(folder) if not UNLISTED.fullmatch(path.name)]
    assert [path.as_posix() for path in files if path.as_posix() not in named] == [], "the tree lacks these files"
    folders = {f"{parent.as_posix()}/" for path in files for parent in path.parents if parent != Path()}
    assert sorted(folders - set(named)) == [], "the tree lacks these folders"


def test_the_layers_are_those_of_the_contracts() -> None:
    contracts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    layers = {each["containers"][0]: re.findall(r"\w+", " ".join(each["layers"])) for each in contracts if "containers" in each}
    section = ARCHITECTURE.read_text(encoding="utf-8").split("## Layers", 1)[1].split("\n## ", 1)[0]
    items = [re.findall(r"`(\w+)`", item) for item in section.split("\n- ") if item.startswith("Inside")]
    assert {names[0]: names[1:] for names in items} == layers


def test_the_locks_events_and_queues_that_the_threads_page_names_exist() -> None:
    section = ARCHITECTURE.read_text(encoding="utf-8").split("## Threads", 1)[1].split("\n## ", 1)[0]
    named = re.findall(r"`([A-Z_]\w+)\.(\w+)`", section)
    paths = [path for folder in ("aggregator", "peers") for path in files_of(folder) if path.suffix == ".py"]
    texts = [(REPOSITORY / path).read_text(encoding="utf-8") for path in paths]
    assert len(named) > 10
    assert [f"{owner}.{name}" for owner, name in named if not any(f"class {owner}" in t and name in t for t in texts)] == []


def test_the_architecture_answers_at_least_ten_questions() -> None:
    section = ARCHITECTURE.read_text(encoding="utf-8").split("## Where do I look?", 1)[1].split("\n## ", 1)[0]
    answers = [line.split("|")[2] for line in section.splitlines() if line.startswith("| ") and "?" in line]
    assert len(answers) >= 10
    assert all(re.search(r"`[\w/]+\.(?:py|proto)`", answer) for answer in answers)


def test_the_readme_points_to_the_architecture() -> None:
    assert "docs/architecture.md" in (REPOSITORY / "README.md").read_text(encoding="utf-8")
