"""Text that every machine has: the source of Python's standard library, split by package among the peers.

Everything follows from the files and the seed; nothing is downloaded. A package goes to one peer, so the peers' data differ in
subject and style (non-IID), which makes averaging hard.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from edit.errors import ConfigError

__all__ = ["Group", "SourceFile", "plan_corpus", "standard_library", "write_corpus"]

# Generated tables, tests, and what not every machine has.
_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "idle_test", "encodings", "pydoc_data"}
)
_HELD_OUT_SHARE = 0.06
_SMALLEST_GROUP = 32_768


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file: its path, its dotted name (`email.message`), its size in bytes."""

    path: Path
    name: str
    size: int

    @property
    def package(self) -> str:
        return self.name.partition(".")[0]


@dataclass(frozen=True, slots=True)
class Group:
    """One peer's text: the files to train on, the files held out."""

    train: tuple[SourceFile, ...]
    held_out: tuple[SourceFile, ...]


def standard_library(root: Path | None = None) -> tuple[SourceFile, ...]:
    """Return every source file of the standard library, by name. root: replaces its folder in tests."""
    root = root or Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, folders, files in os.walk(root):
        package = Path(folder).relative_to(root).parts
        folders[:] = [name for name in folders if name not in _LEFT_OUT and (package or not name.startswith("config-"))]
        for path in map(Path(folder).joinpath, files):
            if path.suffix == ".py" and path.stem not in _LEFT_OUT and (package or not path.stem.startswith("config-")):
                found.append(SourceFile(path, ".".join((*package, path.stem)), path.stat().st_size))
    return tuple(sorted(found, key=lambda file: file.name))


def plan_corpus(files: Iterable[SourceFile], peers: int, seed: int, cap: int = 6_000_000) -> tuple[Group, ...]:
    """Divide the packages into `peers` groups of similar size, at most `cap` bytes together, and hold some files out.

    The largest packages come first, each goes to the smallest group; a file that would exceed cap / peers is
    left out. The seed decides only which files are held out. Raises ConfigError when a group would be too small to learn from.
    """
    packages: dict[str, list[SourceFile]] = {}
    for file in sorted(files, key=lambda file: file.name):
        if file.size:
            packages.setdefault(file.package, []).append(file)
    dealt: list[list[SourceFile]] = [[] for _ in range(peers)]
    room = [cap // peers] * peers
    for _, members in sorted(packages.items(), key=lambda item: (-sum(file.size for file in item[1]), item[0])):
        least = max(range(peers), key=lambda index: (room[index], -index))
        for file in members:
            if file.size <= room[least]:
                dealt[least].append(file)
                room[least] -= file.size
    sizes = [sum(file.size for file in group) for group in dealt]
    if min(sizes) < _SMALLEST_GROUP:
        raise ConfigError(
            f"--peers {peers}: this Python's standard library has only {sum(sizes)} bytes of source for them; use fewer peers"
        )
    return tuple(_hold_out(group, seed) for group in dealt)


def _hold_out(files: Sequence[SourceFile], seed: int) -> Group:
    """Hold out files in an order that follows from the seed, up to a share of the bytes; at least the smallest file."""
    budget = int(_HELD_OUT_SHARE * sum(file.size for file in files))
    order = sorted(files, key=lambda file: hashlib.sha256(f"{seed}:{file.name}".encode()).digest())
    held: set[str] = set()
    for file in order:
        if file.size <= budget:
            held.add(file.name)
            budget -= file.size
    if not held:
        held = {min(files, key=lambda file: (file.size, file.name)).name}
    return Group(
        train=tuple(file for file in files if file.name not in held),
        held_out=tuple(file for file in files if file.name in held),
    )


def write_corpus(groups: Sequence[Group], folder: Path) -> None:
    """Copy the files into `folder`/peer-0, peer-1, ... and `folder`/validation, flat, each under its dotted name."""
    peer_folders = tuple(folder / f"peer-{index}" for index in range(len(groups)))
    validation = folder / "validation"
    for target in (*peer_folders, validation):
        target.mkdir(parents=True, exist_ok=True)
    for group, target in zip(groups, peer_folders, strict=True):
        _copy(group.train, target)
        _copy(group.held_out, validation)


def _copy(files: Iterable[SourceFile], folder: Path) -> None:
    for file in files:
        shutil.copyfile(file.path, folder / f"{file.name}.py")
