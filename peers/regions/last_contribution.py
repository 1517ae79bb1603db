"""What a region contributed last, and what its codec owes, on disk: after a kill they tell what the run above has of it.

Each file is written whole or not at all, and carries a digest, so that a damaged one is noticed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from edit.durable_files import check_format, write_atomic_with
from edit.fragments.digest import digest
from edit.plain_text import parse_json
from edit.regional_peer import Owed, Sent

__all__ = ["SentFile"]

_log = logging.getLogger("peers")
FORMAT = 2
OLDER = (1,)  # without tokens
_T = TypeVar("_T")


class SentFile:
    """`edit.regional_peer.Memory` in the file `path` and in `residual.safetensors` beside it, for the run above `run_id`.

    What is read is None, with a line in the log, where a file is damaged.
    """

    def __init__(self, path: Path, run_id: str) -> None:
        self._path, self._run_id = path, run_id
        self._owed = path.with_name("residual.safetensors")

    def sent(self) -> Sent | None:
        """Return what was kept last."""
        return _tried(self._path, self._read_sent)

    def keep(self, sent: Sent) -> None:
        """Keep it; durable when this returns. Raises StorageError."""
        about = {
            "run_id": self._run_id,
            "upper_step": sent.upper_step,
            "lower_step": sent.lower_step,
            "lower_tokens": sent.lower_tokens,
            "tokens": sent.tokens,
            "digest": digest(sent.parameters),
        }
        _write(self._path, "sent", about, dict(enumerate(sent.parameters)))

    def owed(self) -> Owed | None:
        """Return what was kept last of that."""
        return _tried(self._owed, self._read_owed)

    def keep_owed(self, owed: Owed) -> None:
        """Keep it; durable when this returns. Raises StorageError."""
        about = {"run_id": self._run_id, "upper_step": owed.upper_step, "digest": _digest(owed.residuals)}
        _write(self._owed, "owed", about, owed.residuals)

    def _read_sent(self) -> Sent | None:
        about, tensors = _read(self._path, "sent")
        if isinstance(about, list):
            about = dict(zip(("run_id", "upper_step", "lower_step", "digest"), about, strict=True))
        parameters = tuple(tensors[i] for i in range(len(tensors)))
        if digest(parameters) != about["digest"]:
            raise ValueError("wrong digest")
        if about["run_id"] != self._run_id:
            return None
        lower_tokens = about.get("lower_tokens")
        tokens = None if lower_tokens is None else int(lower_tokens)
        return Sent(int(about["upper_step"]), int(about["lower_step"]), parameters, tokens, int(about.get("tokens", 0)))

    def _read_owed(self) -> Owed | None:
        about, tensors = _read(self._owed, "owed")
        if _digest(tensors) != about["digest"]:
            raise ValueError("wrong digest")
        return Owed(int(about["upper_step"]), tensors) if about["run_id"] == self._run_id else None


def _write(path: Path, name: str, about: Mapping[str, object], tensors: Mapping[int, Tensor]) -> None:
    texts = {"format": str(FORMAT), name: json.dumps(about)}
    named = {f"{i}": tensor for i, tensor in tensors.items()}
    write_atomic_with(path, lambda file: save_file(named, file, texts), failures=(SafetensorError,))


def _tried(path: Path, read: Callable[[], _T]) -> _T | None:
    if not path.exists():
        return None
    try:
        return read()
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, AttributeError) as error:
        _log.warning("%s: is damaged and ignored (%s)", path, error)
        return None


def _read(path: Path, name: str) -> tuple[Any, dict[int, Tensor]]:
    with safe_open(path, framework="pt") as file:
        texts, keys = file.metadata(), file.keys()
        check_format(path, int(texts.get("format", "1")), FORMAT, OLDER)
        return parse_json(texts[name]), {int(key): file.get_tensor(key) for key in keys}


def _digest(residuals: Mapping[int, Tensor]) -> str:
    """Return a digest of the bytes of residuals in any form."""
    return digest([residual.view(torch.uint8) for _, residual in sorted(residuals.items())])
