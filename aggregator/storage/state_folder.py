"""The coordinator's folder on disk: where each file lies, who may use the folder, and how often it was started.

Owns: names of files, the exclusive lock, run.json, the incarnation counter, atomic small writes. Must not know: what the
journal, the checkpoints or the certificates contain.

A run that is spread over several aggregators has a folder for each; aggregator 0's is the coordinator's.
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
import secrets
from pathlib import Path

from edit.config.run import RunConfig, ServerConfig
from edit.durable_files import read_json, write_atomic, write_json
from edit.errors import ConfigError, StorageError

__all__ = ["StateFolder", "address_of"]

FORMAT = 1  # of run.json


def address_of(config: RunConfig, aggregator: int, run_toml: Path) -> str:
    """HOST:PORT of a further aggregator. Raises ConfigError when the run has no such one."""
    addresses = config.aggregators.addresses
    if not 1 <= aggregator <= len(addresses):
        raise ConfigError(
            f"{run_toml}: aggregators.addresses has {len(addresses)} entries; there is no aggregator {aggregator}"
        )
    return addresses[aggregator - 1]


def _interface(host: str) -> str:
    """Where an aggregator listens that is dialled as `host`: a loopback address stays one."""
    if host in ("127.0.0.1", "localhost", "[::1]"):
        return host
    return "[::]" if host.startswith("[") else "0.0.0.0"  # every certificate is checked, whatever it comes in by


class StateFolder:
    """One run's folder. `create` makes it, the constructor opens it (ConfigError when it is not one)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not self.run_json.is_file():
            raise ConfigError(f"{path}: holds no run; `edit-coordinator init --state {path}` makes one")
        try:
            values = read_json(self.run_json, version=FORMAT)
            self.run_id, self.aggregator = str(values["run_id"]), int(values.get("aggregator", 0))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self.run_json}: is damaged; restore it from a copy ({error})") from error

    @classmethod
    def create(cls, path: Path, run_toml: str) -> StateFolder:
        """Make a new folder with this run.toml. Raises ConfigError when it already holds a run or the settings are wrong."""
        if (path / "run.json").exists():
            raise ConfigError(f"{path}: already holds a run; choose another --state folder")
        try:
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(0o700)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be created ({error.strerror})") from error
        write_atomic(path / "run.toml", run_toml.encode())
        config = RunConfig.from_toml(path / "run.toml")
        run_id = f"{config.name}-{secrets.token_hex(4)}"
        write_json(path / "run.json", {"run_id": run_id}, version=FORMAT)
        return cls(path)

    @classmethod
    def create_further(cls, path: Path, coordinator: StateFolder, aggregator: int) -> StateFolder:
        """The folder of a further aggregator of the coordinator's run, made or brought up to its settings.

        Raises ConfigError when `path` holds something else, or run.toml does not name so many.
        """
        if (path / "run.json").exists():
            there = cls(path)
            if (there.run_id, there.aggregator) != (coordinator.run_id, aggregator):
                raise ConfigError(f"{path}: is of aggregator {there.aggregator} of run {there.run_id}; choose another folder")
        address_of(coordinator.config(), aggregator, coordinator.run_toml)
        try:
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(0o700)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be created ({error.strerror})") from error
        write_atomic(path / "run.toml", coordinator.run_toml.read_bytes())
        write_json(path / "run.json", {"run_id": coordinator.run_id, "aggregator": aggregator}, version=FORMAT)
        return cls(path)

    @property
    def run_json(self) -> Path:
        return self.path / "run.json"

    @property
    def run_toml(self) -> Path:
        return self.path / "run.toml"

    @property
    def addresses(self) -> Path:
        """Where `serve` writes the addresses it really bound (port 0 in run.toml)."""
        return self.path / "addresses.json"

    @property
    def deadlines(self) -> Path:
        """The peers' measured times, so that a restart need not measure anew."""
        return self.path / "deadlines.json"

    @property
    def orders(self) -> Path:
        """Whether the operator paused or drained the run."""
        return self.path / "orders.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def outer(self) -> Path:
        """Checkpoints and journals of the outer state."""
        return self.path / "outer"

    @property
    def spill(self) -> Path:
        return self.path / "spill"

    def config(self) -> RunConfig:
        """The run's; a further aggregator's own addresses, too, are in it as those of the server."""
        config = RunConfig.from_toml(self.run_toml)
        if self.aggregator == 0:
            return config
        host, _, port = address_of(config, self.aggregator, self.run_toml).rpartition(":")
        server = ServerConfig(listen=f"{_interface(host)}:{port}", advertise=(host,))
        return dataclasses.replace(config, server=server)

    def lock(self) -> int:
        """Take the folder for this process until it ends; returns the descriptor that holds it.

        Raises ConfigError when another coordinator has it: two on one folder would fork the run.
        """
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise ConfigError(f"{self.path}: another coordinator is serving this folder; end it first") from None
        return descriptor

    def next_incarnation(self) -> int:
        """Count this start, durably: round ids of different starts never meet."""
        path = self.path / "incarnation"
        try:
            last = int(path.read_text()) if path.exists() else 0
        except ValueError as error:
            raise StorageError(f"{path}: is damaged; write a number larger than any before into it") from error
        write_atomic(path, str(last + 1).encode())
        return last + 1
