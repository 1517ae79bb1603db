"""The options of one peer, with their checks. Everything else is the run's configuration, which the coordinator sends."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from edit import plugins
from edit.config.plugins import PREFIX, is_entry
from edit.errors import ConfigError
from edit.trackers.choose import NO_TRACKERS, TrackerChoice
from editpb.invitation import check_dht_peers, is_endpoint
from peers.identity.policy import NO_POLICY, SitePolicy
from peers.training.fault_injection import Fault

if TYPE_CHECKING:
    from edit.config.run import RunConfig
    from peers.training.data_source import DataRequest

__all__ = ["PeerOptions", "check_data", "data_request"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOptions:
    """The options of `edit-peer run`."""

    home: Path
    data: Path | str  # files, or `entry:NAME`, a plug-in of edit.data
    data_options: Mapping[str, str | int | float | bool] = field(default_factory=dict)  # of that plug-in
    jsonl_field: str | None = None  # of the lines of .jsonl files: has the text
    new_data: bool = False  # other data than the checkpoint's is begun at its start
    device: str | None = None
    threads: int | None = None  # None: torch's choice
    metrics: Path | None = None  # a file of JSON lines
    throttle: float = 1.0  # an inner step takes so many times as long
    faults: tuple[Fault, ...] = ()
    allowed: frozenset[str] = frozenset()  # plug-ins that this peer's operator trusts
    model_folder: Path | None = None  # of an `hf:` model: its configuration, and maybe weights to found the run with
    tensor_parallel: int = 1  # ranks that share each matrix product
    checkpoints: Path | None = None  # their folder; None: `home`/checkpoints
    checkpoint_every: int = 1  # outer steps between two checkpoints; 0: none
    keep_checkpoints: int = 2
    fresh: bool = False  # start without a checkpoint although there is one
    serve_snapshots: str | None = None  # HOST:PORT; None: serves none
    advertise: str | None = None  # the host by which members reach serve_snapshots; None: its HOST
    dht_peers: tuple[str, ...] = ()  # libp2p nodes of the DHT in which a lost coordinator is looked for
    members: Mapping[str, tuple[str, ...]] | None = None  # as `MaskFolder`'s
    max_mbit: float | None = None  # what this peer sends per second, in 10^6 bits; None: no bound
    trackers: TrackerChoice = NO_TRACKERS
    hide_loss: bool = False  # its training loss is said to nobody
    policy: SitePolicy = NO_POLICY  # what the site allows
    max_epsilon: float | None = None  # of differential privacy, without which it does not train then; None: as the run says

    def __post_init__(self) -> None:
        if not self.throttle >= 1 or not math.isfinite(self.throttle):
            raise ConfigError(f"--throttle {self.throttle}: must be a finite number of at least 1")
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"--threads {self.threads}: must be at least 1")
        if self.checkpoint_every < 0:
            raise ConfigError(f"--checkpoint-every {self.checkpoint_every}: must be at least 0 (0 keeps no checkpoints)")
        if self.keep_checkpoints < 1:
            raise ConfigError(f"--keep-checkpoints {self.keep_checkpoints}: must be at least 1")
        if self.max_epsilon is not None and not (self.max_epsilon > 0 and math.isfinite(self.max_epsilon)):
            raise ConfigError(f"--max-epsilon {self.max_epsilon}: must be a finite number above 0")
        check_data(self.data, self.data_options, self.jsonl_field, self.allowed)
        check_dht_peers(self.dht_peers)
        self._check_serving()

    def _check_serving(self) -> None:
        listen, host = self.serve_snapshots, self.serving_host
        if listen is None and self.advertise is not None:
            raise ConfigError(f"--advertise {self.advertise}: has no effect without --serve-snapshots; give that, too")
        if listen is not None and not is_endpoint(listen.removesuffix(":0") + ":1" if listen.endswith(":0") else listen):
            raise ConfigError(f"--serve-snapshots {listen}: must be HOST:PORT; port 0 chooses one")
        if listen is not None and self.advertise is None and host in ("0.0.0.0", "[::]"):
            raise ConfigError(
                f"--serve-snapshots {listen}: others cannot connect to {host}; name the host that they can reach: --advertise"
            )
        if listen is not None and not is_endpoint(f"{host}:1"):
            raise ConfigError(f"--advertise {host}: must be a host name or an address (IPv6 in brackets), without a port")

    @property
    def data_plugin(self) -> str:
        """`entry:NAME` of the data, or empty: files."""
        return str(self.data) if is_entry(str(self.data)) else ""

    def data_request(self, config: RunConfig, peer_id: str) -> DataRequest:
        """Return what this peer's data is opened with."""
        return data_request(config, peer_id, self.data, self.data_options, self.jsonl_field)

    @property
    def serving_host(self) -> str:
        """The host at which others read this peer's snapshots; empty when it serves none."""
        return self.advertise or (self.serve_snapshots or "").rpartition(":")[0]

    @property
    def trackers_folder(self) -> Path:
        """The folder of what trackers write."""
        return self.home / "trackers"

    @property
    def checkpoint_folder(self) -> Path:
        """The folder of this peer's checkpoints."""
        return self.home / "checkpoints" if self.checkpoints is None else self.checkpoints


def check_data(data: Path | str, options: Mapping[str, object], jsonl_field: str | None, allowed: frozenset[str]) -> None:
    """Raise ConfigError where --data and the options beside it cannot be. Imports no plug-in."""
    if is_entry(name := str(data)):
        plugins.check("data", name.removeprefix(PREFIX), allowed)
        if jsonl_field is not None:
            raise ConfigError(f"--field {jsonl_field}: has no effect with --data {name}; leave it out")
    elif not Path(data).exists():
        raise ConfigError(
            f"--data {data}: does not exist; give a text file, a folder of text, a token file, or entry:NAME, a plug-in"
        )
    elif options:
        raise ConfigError(f"--data-option {next(iter(options))}: has no effect without --data entry:NAME; leave it out")
    else:
        from peers.training.data import check_field

        check_field(Path(data), jsonl_field)


def data_request(
    config: RunConfig,
    peer_id: str,
    data: Path | str,
    options: Mapping[str, str | int | float | bool],
    jsonl_field: str | None,
) -> DataRequest:
    """Return what the data of --data is opened with in this run."""
    from peers.training.data import stream_seed
    from peers.training.data_source import DataRequest

    return DataRequest(
        path=None if is_entry(str(data)) else Path(data),
        jsonl_field=jsonl_field,
        context=config.model.context,
        vocabulary=config.model.vocabulary,
        batch_size=config.inner.batch_size,
        seed=stream_seed(config.seed, peer_id),
        peer_id=peer_id,
        options=options,
    )
