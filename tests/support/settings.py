"""A `WorkerConfig` from flat keywords."""

from typing import Any

from edit.config.algorithm import OuterConfig, RoundsConfig, SyncConfig
from edit.config.codec import CodecConfig
from edit.worker.config import WorkerConfig


def worker_config(
    *,
    codec: str | CodecConfig = "int8",
    max_staleness: int = 0,
    outer: OuterConfig | None = None,
    buffers: str = "local",
    **sync: Any,
) -> WorkerConfig:
    """sync: as `SyncConfig`."""
    return WorkerConfig(
        sync=SyncConfig(**sync),
        codec=codec if isinstance(codec, CodecConfig) else CodecConfig(up=codec),
        rounds=RoundsConfig(max_staleness=max_staleness),
        outer=outer or OuterConfig(),
        buffers=buffers,
    )
