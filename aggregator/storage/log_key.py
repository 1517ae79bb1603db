"""The private key of an audit log, in the folder of its aggregator; made when it is asked for first."""

from __future__ import annotations

from pathlib import Path

from aggregator.storage.state_folder import AUDIT_LOG
from edit.durable_files import read_private, write_atomic
from edit.errors import ConfigError
from edit.trust.checkpoints import LogSigner

__all__ = ["open_log_key"]

_PRIVATE = "log.key"


def open_log_key(folder: Path, origin: str) -> LogSigner:
    """Return what signs the heads of a log. origin: `editpb.audit_log.log_origin`.

    Raises ConfigError where the log has entries and no key, StorageError.
    """
    path = folder / _PRIVATE
    if not path.exists():
        if (folder / AUDIT_LOG).exists():
            raise ConfigError(f"{path}: is missing, and the log has entries that are signed with it; restore it from a copy")
        write_atomic(path, LogSigner.new_key(), mode=0o600)
    try:
        return LogSigner(origin, read_private(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
