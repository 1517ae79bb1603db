"""Kernels: the hot loops of codecs and norms in one pass each, compiled by numba where it is installed (the extra `fast`).

Owns the loops (`loops`), their compilation, and the choice between them and torch. Must not know codecs, merges, peers.
torch is the fallback and the oracle: with kernels and without, all results have the same bits, on every CPU. (numba leaves the
order and the rounding of floating-point operations alone unless it is told `fastmath`, and fuses none.)

`load` compiles or reads the cache. Until a process calls it, as `edit-coordinator serve` and `EditWorker` do when they start,
and wherever numba is missing, torch computes. EDIT_KERNELS=torch in the environment turns the kernels off; EDIT_KERNELS=numba
demands them.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from edit.errors import ConfigError
from edit.kernels import loops

__all__ = ["fast", "load"]

_SWITCH = "EDIT_KERNELS"
_compiled: Any = None  # the functions of `loops`, compiled
_loading = threading.Lock()  # numba has one cache folder for the process, which is set while they are compiled


def fast(*tensors: Tensor) -> Any:
    """Return the compiled functions of `edit.kernels.loops`, or None where torch has to compute.

    tensors: what they are to work on. They take contiguous tensors on the CPU.
    """
    if _compiled is not None and all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors):
        return _compiled
    return None


def load() -> str:
    """Make the kernels ready for this process, once; return one line for the log: what computes, and why. From any thread.

    The first time on a machine it compiles for some seconds; afterwards it reads the user's cache folder. Raises ConfigError
    for an EDIT_KERNELS that says nothing, or that demands numba where it cannot be imported.
    """
    with _loading:
        return _load()


@cache
def _load() -> str:
    global _compiled
    choice = os.environ.get(_SWITCH, "")
    if choice not in ("", "torch", "numba"):
        raise ConfigError(f"{_SWITCH} = {choice!r} must be torch or numba, or not set")
    if choice == "torch":
        return f"kernels: torch ({_SWITCH})"
    try:
        import numba
    except ImportError as error:
        if choice == "numba":
            raise ConfigError(
                f"{_SWITCH} = numba, but it cannot be imported ({error}): pip install 'edit-localsgd[fast]'"
            ) from error
        return f"kernels: torch (numba cannot be imported: {error})"
    if numba.config.DISABLE_JIT:
        return "kernels: torch (NUMBA_DISABLE_JIT)"
    folder, why = (Path(numba.config.CACHE_DIR), "") if numba.config.CACHE_DIR else _cache_folder()
    _compiled = SimpleNamespace(**_compile(numba, folder))
    return f"kernels: numba {numba.__version__}, {f'cached in {folder}' if folder is not None else f'not cached: {why}'}"


def _compile(numba: Any, folder: Path | None) -> dict[str, Callable[..., Any]]:
    """Return every loop by its name, compiled for the arrays that it takes, or as the cache has it."""
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(folder or "")  # read when a function is decorated; of no concern to others that use numba
    try:
        return {
            name: numba.njit(signature, nogil=True, error_model="numpy", cache=folder is not None)(getattr(loops, name))
            for name, signature in loops.SIGNATURES.items()
        }
    finally:
        numba.config.CACHE_DIR = before


def _cache_folder() -> tuple[Path | None, str]:
    """Return the cache folder, made if need be, or None and why there is none. Whoever can write to it runs code in here."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edit" / "kernels"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except (OSError, RuntimeError) as error:  # RuntimeError: no home
        return None, str(error)
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return None, f"others can write to {folder}"
    return (folder, "") if os.access(folder, os.W_OK) else (None, f"{folder} cannot be written to")
