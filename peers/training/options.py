"""What the operator of a peer sets for this peer alone, checked; everything else is the run's and comes from the coordinator.

Owns: the settings, their defaults and bounds, the messages for wrong ones. Must not know: how they are read, what they do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from edit.errors import ConfigError
from editpb.invitation import is_endpoint
from peers.training.fault_injection import Fault

__all__ = ["PeerOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOptions:
    """The options of `edit-peer run`.

    threads: of torch, None leaves torch's own choice; metrics: JSON-lines file; throttle: how many times longer a step takes;
    allowed_models: entry points that this peer's operator trusts; model_folder: of an `hf:` model, its configuration and maybe
    weights to found the run with; tensor_parallel: ranks that share each matrix product;
    checkpoints: their folder, None is `home`/checkpoints; checkpoint_every: outer steps between two, 0 keeps none;
    keep_checkpoints: how many; fresh: begin anew although there is a checkpoint;
    serve_snapshots: HOST:PORT on which members that join may read snapshots, None serves none; advertise: the host that they
    dial, None is that of serve_snapshots.
    """

    home: Path
    data: Path
    device: str | None = None
    threads: int | None = None
    metrics: Path | None = None
    throttle: float = 1.0
    faults: tuple[Fault, ...] = ()
    allowed_models: frozenset[str] = frozenset()
    model_folder: Path | None = None
    tensor_parallel: int = 1
    checkpoints: Path | None = None
    checkpoint_every: int = 1
    keep_checkpoints: int = 2
    fresh: bool = False
    serve_snapshots: str | None = None
    advertise: str | None = None

    def __post_init__(self) -> None:
        if not self.throttle >= 1 or not math.isfinite(self.throttle):
            raise ConfigError(f"--throttle {self.throttle}: must be a finite number of at least 1")
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"--threads {self.threads}: must be at least 1")
        if self.checkpoint_every < 0:
            raise ConfigError(f"--checkpoint-every {self.checkpoint_every}: must be at least 0 (0 keeps no checkpoints)")
        if self.keep_checkpoints < 1:
            raise ConfigError(f"--keep-checkpoints {self.keep_checkpoints}: must be at least 1")
        if not self.data.exists():
            raise ConfigError(f"--data {self.data}: does not exist; give a text file, a folder of text or a token file")
        self._check_serving()

    def _check_serving(self) -> None:
        listen, host = self.serve_snapshots, self.serving_host
        if listen is None and self.advertise is not None:
            raise ConfigError(f"--advertise {self.advertise}: says where --serve-snapshots is dialled; give that too")
        if listen is not None and not is_endpoint(listen.removesuffix(":0") + ":1" if listen.endswith(":0") else listen):
            raise ConfigError(f"--serve-snapshots {listen}: must be HOST:PORT; port 0 chooses one")
        if listen is not None and self.advertise is None and host in ("0.0.0.0", "[::]"):
            raise ConfigError(
                f"--serve-snapshots {listen}: others cannot dial {host}; give the host that they dial: --advertise"
            )
        if listen is not None and not is_endpoint(f"{host}:1"):
            raise ConfigError(f"--advertise {host}: must be a host name or an address (IPv6 in brackets), without a port")

    @property
    def serving_host(self) -> str:
        """The host at which others dial this peer's snapshots; '' when it serves none."""
        return self.advertise or (self.serve_snapshots or "").rpartition(":")[0]

    @property
    def checkpoint_folder(self) -> Path:
        """Where this peer's checkpoints are."""
        return self.home / "checkpoints" if self.checkpoints is None else self.checkpoints
