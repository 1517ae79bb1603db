"""What a function returns at each rank of a replica of real processes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.world import spawn


def at_every_rank(call: Callable[..., Any], size: int, folder: Path, *arguments: Any) -> list[Any]:
    """What `call(*arguments)` returns at each of `size` ranks, in their order; a failure in one is the test's failure.

    call: of a module; torch.distributed is initialised around it. It returns plain values and tensors.
    """
    spawn(_answer, size, folder, call, folder, arguments)
    return [pickle.loads(_path(folder, rank).read_bytes()) for rank in range(size)]  # noqa: S301 - written just now, by us


def _answer(rank: int, call: Callable[..., Any], folder: Path, arguments: tuple[Any, ...]) -> None:
    _path(folder, rank).write_bytes(pickle.dumps(call(*arguments)))


def _path(folder: Path, rank: int) -> Path:
    return folder / f"answer-{rank}"
