"""What torchrun tells a process about its replica. This is the only file of the peer that reads the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from edit.errors import ConfigError

__all__ = ["ALONE", "Launch", "launched"]

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The position of this process in its replica."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # among the ranks on this machine
    local_size: int = 1
    restarts: int = 0  # how often torchrun has restarted this replica

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which reports and decides for the replica."""
        return self.rank == 0


ALONE = Launch()


def launched(environment: Mapping[str, str] = os.environ) -> Launch:
    """Return the position that torchrun gave this process; without torchrun, one rank.

    Raises ConfigError when the variables contradict one another or some are missing.
    """
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return ALONE
    missing = [name for name in (*_NAMES, "MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing:
        raise ConfigError(f"{missing[0]} is not set although this is one rank of several; start the replica with torchrun")
    rank, size, local_rank, local_size = (_number(name, environment[name]) for name in _NAMES)
    if not (rank < size and local_rank < local_size <= size):
        raise ConfigError(
            f"RANK {rank} of {size}, LOCAL_RANK {local_rank} of {local_size}: not a rank; start the replica with torchrun"
        )
    restarts = _number("TORCHELASTIC_RESTART_COUNT", environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return Launch(rank=rank, size=size, local_rank=local_rank, local_size=local_size, restarts=restarts)


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{name} = {text!r}: must be a number; start the replica with torchrun")
    return int(text)
