"""A torch.distributed world of real processes (gloo) that meet over a file, for tests of what ranks do together."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PRELOADED = ["tests.support.world", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"]
"""What the ranks need and no longer import themselves: they are forked from a process that has, and does nothing else."""


def spawn(work: Callable[..., None], ranks: int, folder: Path, *arguments: object) -> None:
    """Call `work(rank, *arguments)` in `ranks` processes; a failure in one is the test's failure. `work` at module level."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    mp.start_processes(_rank, (work, ranks, str(folder / "store"), arguments), ranks, start_method="forkserver")


def _rank(rank: int, work: Callable[..., None], ranks: int, store: str, arguments: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    work(rank, *arguments)
    dist.barrier()
    dist.destroy_process_group()
