"""The folder of one run: where each file lies, the exclusive lock, the bound addresses, and the number of each start.

A run that is spread over several aggregators has a folder for each; aggregator 0's is the coordinator's.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from edit import plugins
from edit.config.overrides import with_settings
from edit.config.run import RunConfig, ServerConfig
from edit.durable_files import lock_file, names_in, read_json, write_atomic, write_json
from edit.errors import ConfigError, StorageError
from edit.plain_text import parse_json, quoted, reason_of
from edit.records import ROUNDS_PER_START
from editpb.folder_kinds import kind_of_folder

__all__ = [
    "AUDIT_COSIGNED",
    "AUDIT_HEAD",
    "AUDIT_KEY",
    "AUDIT_LOG",
    "AUTHORITY",
    "StateFolder",
    "address_of",
    "lock_folder",
    "refuse_swarm",
]

AUDIT_LOG, AUDIT_HEAD = "audit-log.jsonl", "audit-log.head"
AUDIT_COSIGNED = "audit-log.cosigned"  # a folder: the heads that members have cosigned
AUDIT_KEY = "audit-log.key"  # the log's public key, where it was exported
AUTHORITY = "ca.pem"  # the certificate of the run's authority

FORMAT = 1  # of run.json
# From one start's number to the next where the clock does not tell them apart: ids for years of aborted rounds.
_NOT_MET = 86_400
MAX_STARTS = (1 << 63) // ROUNDS_PER_START - _NOT_MET  # round ids have 63 bits; for two centuries they are below 2^53
_SERVE_WRITES = "remove it; `edit-coordinator serve` writes it anew"


def address_of(config: RunConfig, aggregator: int, run_toml: Path) -> str:
    """Return HOST:PORT of a further aggregator. Raises ConfigError when run.toml does not name it."""
    addresses = config.aggregators.addresses
    if not 1 <= aggregator <= len(addresses):
        raise ConfigError(
            f"{run_toml}: aggregators.addresses has {len(addresses)} entries; there is no aggregator {aggregator}"
        )
    return addresses[aggregator - 1]


def _interface(host: str) -> str:
    """Return where an aggregator listens that peers reach as `host`: a loopback address stays one."""
    if host in ("127.0.0.1", "localhost", "[::1]"):
        return host
    return "[::]" if host.startswith("[") else "0.0.0.0"  # every certificate is checked, whatever it comes in by


def refuse_swarm(config: RunConfig, run_toml: Path) -> None:
    """Raise ConfigError for the settings of a swarm: a coordinator would do nothing of what they ask for."""
    if config.swarm is not None:
        raise ConfigError(
            f"{run_toml}: [swarm] is of a run without a coordinator; remove it, or begin such a run with: "
            f"edit-peer swarm start {quoted(run_toml)}"
        )


def lock_folder(folder: Path, taken: str) -> int:
    """Lock a folder for this process until it ends; return the descriptor that holds the lock.

    taken: what it means that another has it: two on one folder would fork the run. Raises ConfigError, StorageError.
    """
    path = folder / "lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error.strerror}); `serve` needs a folder that it may write") from error
    try:
        if not lock_file(descriptor, path):
            raise ConfigError(f"{folder}: {taken}; end it first")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class StateFolder:
    """One run's folder. `create` makes it; the constructor opens it, and raises ConfigError when it holds no run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_json = path / "run.json"  # the run's identity
        self.run_toml = path / "run.toml"  # its settings
        self.addresses = path / "addresses.json"  # what `serve` really bound, for port 0 in run.toml
        self.deadlines = path / "deadlines.json"  # the peers' measured times, so that a restart need not measure them again
        self.orders = path / "orders.json"  # whether the operator paused or drained the run
        self.high_water = path / "high-water.json"  # the last committed outer step, beside the journal
        self.incarnation = path / "incarnation"  # the number of the last start of `serve`: no two starts use the same round ids
        self.metrics = path / "metrics.jsonl"
        self.privacy_ledger = path / "privacy-ledger.jsonl"  # attempts at outer steps with noise
        self.outer = path / "outer"  # checkpoints and journals of the outer state
        self.contributions = path / "contributions"  # those behind the last outer steps, with audit.keep_contributions
        self.spill = path / "spill"  # uploads above the memory bound
        self._changed: bytes | None = None  # the text of run.toml that `keep_settings` writes; None: nothing is changed
        self._read = b""  # the one that it was made of
        try:
            if not self.run_json.is_file():
                raise ConfigError(f"{path}: holds no run; `edit-coordinator init --state {quoted(path)}` makes one")
            values = read_json(self.run_json, version=FORMAT)
            self.run_id, self.aggregator = str(values["run_id"]), int(values.get("aggregator", 0))
        except OSError as error:
            raise ConfigError(f"{self.run_json}: cannot be read ({reason_of(error)})") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self.run_json}: is damaged; restore it from a copy ({error})") from error

    @staticmethod
    def exists(path: Path) -> bool:
        """Return whether this folder holds a run."""
        return (path / "run.json").exists()

    @classmethod
    def begun(cls, path: Path) -> bool:
        """Return whether `init` has failed here: the run has no authority, and nobody was invited to it, or served it, yet.

        Raises ConfigError, StorageError, OSError.
        """
        if not cls.exists(path) or cls(path).aggregator:
            return False
        return not (path / "ca.key").exists() and cls._unused(path)

    @staticmethod
    def _unused(path: Path) -> bool:
        """Whether nobody was invited to the run, or served it, yet. Raises StorageError."""
        return not ((path / "incarnation").exists() or (path / "outer").exists() or names_in(path / "invitations"))

    @classmethod
    def _make_for_new(cls, path: Path) -> None:
        """Make the folder of a new run, if need be. Raises ConfigError where it holds a run or something else, StorageError."""
        try:
            begun = cls.begun(path)
            if cls.exists(path) and not begun:
                whole = (path / "ca.key").exists() and cls._unused(path)  # `init` may have failed at its very end
                instead = (
                    f"it is whole, and was not used yet; run `edit-coordinator serve --state {quoted(path)}`, or "
                    if whole
                    else ""
                )
                raise ConfigError(f"{path}: already holds a run; {instead}choose another --state folder")
            if not begun and (kind := kind_of_folder(path)):
                raise ConfigError(f"{path}: is the folder of {kind}; choose another --state folder")
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(0o700)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be created ({error.strerror})") from error

    @classmethod
    def lock_new(cls, path: Path) -> int:
        """Make the folder of a new run, and lock it; return the descriptor that holds the lock.

        Until all of the run is there, `begun` cannot tell an `init` that is at work from one that has failed: who makes a run
        holds the lock, and calls `create` then. Raises ConfigError where the folder holds a run or something else, or is
        locked, StorageError.
        """
        cls._make_for_new(path)
        return lock_folder(path, "another init is at work here")

    @classmethod
    def create(cls, path: Path, run_toml: str) -> StateFolder:
        """Make a new folder with this run.toml, also where `init` has failed before.

        Raises ConfigError when it already holds a run or the settings are wrong.
        """
        cls._make_for_new(path)
        write_atomic(path / "run.toml", run_toml.encode())
        config = RunConfig.from_toml(path / "run.toml")
        run_id = f"{config.name}-{secrets.token_hex(4)}"
        write_json(path / "run.json", {"run_id": run_id}, version=FORMAT)
        return cls(path)

    @classmethod
    def create_further(cls, path: Path, coordinator: StateFolder, aggregator: int) -> StateFolder:
        """Make the folder of a further aggregator of the coordinator's run, or bring it up to the present settings.

        Raises ConfigError when `path` holds something else, or run.toml does not name the aggregator.
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

    def change(self, settings: Sequence[str]) -> None:
        """Put settings, `SECTION.KEY=VALUE`, into the text of run.toml; none of them when one is wrong. Raises ConfigError.

        `keep_settings` writes it.
        """
        text = self._text()
        RunConfig.from_text(text, self.run_toml, settings)
        self._change(text, with_settings(text.decode(), settings).encode())

    def keep_settings(self) -> None:
        """Write into run.toml what `change` and `pin` have put into its text.

        Once the settings fit what the folder holds: those that do not are not in the way of the next start; and before anything
        is written with them. The folder is locked. Raises StorageError; ConfigError where somebody has edited run.toml since.
        """
        if self._changed is None:
            return
        if RunConfig.bytes_of(self.run_toml) != self._read:
            raise ConfigError(f"{self.run_toml}: was edited while `serve --set` or `--allow` began; start it again")
        write_atomic(self.run_toml, self._changed)
        self._changed = None

    def _text(self) -> bytes:
        """Return run.toml, with what is changed in it. Raises ConfigError."""
        return self._changed if self._changed is not None else RunConfig.bytes_of(self.run_toml)

    def _change(self, text: bytes, changed: bytes) -> None:
        """Take another text in place of what `_text` has returned."""
        if changed == text:
            return
        if self._changed is None:
            self._read = text
        self._changed = changed

    def config(self) -> RunConfig:
        """Return the run's settings; at a further aggregator its own address is the server's in them. Raises ConfigError."""
        config = RunConfig.from_text(self._text(), self.run_toml)
        refuse_swarm(config, self.run_toml)
        if self.aggregator == 0:
            return config
        host, _, port = address_of(config, self.aggregator, self.run_toml).rpartition(":")
        server = ServerConfig(listen=f"{_interface(host)}:{port}", advertise=(host,))
        return dataclasses.replace(config, server=server)

    def pin(self, allowed: Collection[str]) -> None:
        """Pin the allowed plug-ins in the text of run.toml, as they are installed here; `keep_settings` writes it.

        Raises ConfigError; see `edit.plugins.pin`.
        """
        text = self._text()
        try:
            before = text.decode()
        except UnicodeDecodeError:
            return  # `config` says so
        self._change(text, plugins.pin(before, allowed).encode())

    def lock(self) -> int:
        """Lock the folder for this process: see `lock_folder`."""
        return lock_folder(self.path, "another coordinator is serving this folder")

    def first_round_id(self, now: float) -> int:
        """Number this start, durably, and return a round id larger than any of an earlier start. Raises StorageError.

        The number follows the clock, so that it is larger also where an older copy of the folder was restored: a peer that runs
        contributes only to rounds newer than those that it knows. Where the clock is behind, it is far above the last number; a
        copy that is restored then may be behind what those peers know.

        now: seconds since 1970.
        """
        mend = f"write a number larger than any before into it: the ids of rounds in {self.metrics.name} begin with it"
        try:
            last = int(self.incarnation.read_bytes())
        except FileNotFoundError:
            if self.founded:
                raise StorageError(f"{self.incarnation}: is missing; {mend}") from None
            last = 0
        except OSError as error:
            raise StorageError(f"{self.incarnation}: cannot be read ({reason_of(error)})") from error
        except ValueError as error:
            raise StorageError(f"{self.incarnation}: is damaged; {mend}") from error
        if not 0 <= last < MAX_STARTS - _NOT_MET:
            raise StorageError(f"{self.incarnation}: {last} is not a number of a start; {mend}")
        start = int(now) if now >= last + 1 else last + _NOT_MET
        write_atomic(self.incarnation, str(start).encode())
        return start * ROUNDS_PER_START + 1

    @property
    def founded(self) -> bool:
        """Whether the run has, or had, parameters. Raises StorageError."""
        return self.high_water.exists() or bool(names_in(self.outer))

    def bound(self) -> Mapping[str, str]:
        """Return the addresses that `serve` bound last, by the names that they have in run.toml; empty before the first time.

        Raises ConfigError when the file is damaged, or cannot be read.
        """
        try:
            values = parse_json(self.addresses.read_bytes())
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise ConfigError(f"{self.addresses}: cannot be read ({reason_of(error)})") from error
        except ValueError as error:
            raise ConfigError(f"{self.addresses}: is damaged ({error}); {_SERVE_WRITES}") from error
        if not isinstance(values, dict) or not all(isinstance(values.get(name), str) for name in ("listen", "enrol_listen")):
            raise ConfigError(f"{self.addresses}: is damaged (no addresses); {_SERVE_WRITES}")
        return values


def part_log_of(folder: Path, first: int) -> Path:
    """Return where the audit log of a swarm's part lies that begins with this entry. folder: of the part."""
    name = Path(AUDIT_LOG)
    return folder / (f"{name.stem}-{first:08d}{name.suffix}" if first else AUDIT_LOG)


def contributions_of(folder: Path) -> Path:
    """Return where the contributions lie that an owner has merged. folder: of a swarm's part."""
    return folder / "contributions"


def part_logs(folder: Path) -> list[tuple[int, Path]]:
    """Return the audit logs of a swarm's part, each with the number of its first entry, in order. folder: of the part.

    Raises StorageError.
    """
    name = Path(AUDIT_LOG)
    names = names_in(folder, f"{name.stem}-*{name.suffix}")
    named = ((each.removeprefix(f"{name.stem}-").removesuffix(name.suffix), folder / each) for each in names)
    found = [(int(number), path) for number, path in named if number.isascii() and number.isdigit()]
    return sorted([*([(0, folder / AUDIT_LOG)] if (folder / AUDIT_LOG).exists() else []), *found])
