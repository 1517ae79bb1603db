"""The exception tree. An exception says whose fault it is; a lost round is a value (`Aborted`), not an exception.

EditError                 exit code 70 unless it says otherwise
 ├─ ConfigError           the user's: a setting, a file or the command line; exit code 2
 │   └─ PluginError       code of another package, which the operator allowed, raises or returns what it must not
 ├─ RefusedError          the other side refuses for good (invitation, certificate, schema); exit code 3
 ├─ EvictedError          the operator evicted this peer from the run; exit code 4
 ├─ LocalProtocolError    ours: a call out of order is a bug
 ├─ RemoteProtocolError   the other side's: it sent something it must not send; no state was touched
 ├─ OutdatedError         nobody's: the run has moved on; either of
 │   ├─ StaleError        the request does not fit the run as it stands now; look at the view, then ask again
 │   └─ GoneError         what was asked for (an old update, an old snapshot) is no longer kept; ask for something newer
 ├─ StorageError          the disk under the state folder is full, failed or damaged; exit code 2
 ├─ FormatError           a file is of another format than this software reads; exit code 2
 └─ TransportError        the connection failed; the same call may be tried again; exit code 69
     ├─ BusyError         the other side has no room for this call now
     └─ RemoteStorageError  the other side's StorageError
"""

from __future__ import annotations

__all__ = [
    "BusyError",
    "ConfigError",
    "EditError",
    "EvictedError",
    "FormatError",
    "GoneError",
    "LocalProtocolError",
    "OutdatedError",
    "PluginError",
    "RefusedError",
    "RemoteProtocolError",
    "RemoteStorageError",
    "StaleError",
    "StorageError",
    "TransportError",
]


class EditError(Exception):
    """Base of every error this project raises on purpose. The message is one line."""

    exit_code = 70


class ConfigError(EditError):
    """A setting, a file or an argument is wrong. The message names the field or file, and how to correct it."""

    exit_code = 2


class PluginError(ConfigError):
    """A plug-in raised, or returned what its contract does not allow. The message names it."""


class RefusedError(EditError):
    """The other side refuses for good: retrying the same call cannot succeed."""

    exit_code = 3


class EvictedError(EditError):
    """The operator evicted this peer from the run. The message is the operator's reason."""

    exit_code = 4


class LocalProtocolError(EditError):
    """A call out of order by this process: a bug in the caller."""


class RemoteProtocolError(EditError):
    """The other side broke the protocol. Nothing of what it sent was applied."""


class OutdatedError(EditError):
    """The request is valid, but the run has moved on. Base of StaleError and GoneError, which say what to do next."""


class StaleError(OutdatedError):
    """The request does not fit the run as it stands now: look at the view, then ask again."""


class GoneError(OutdatedError):
    """What was asked for is no longer kept: ask for something newer."""


class StorageError(EditError):
    """The state folder cannot be written or its contents are damaged."""

    exit_code = 2


class FormatError(EditError):
    """A file is of another format than this software reads. It is not damaged, and must not be skipped as damaged files are."""

    exit_code = 2


class TransportError(EditError):
    """The connection failed or timed out; the same call may be tried again."""

    exit_code = 69


class BusyError(TransportError):
    """The other side serves as many as it can now; the same call may be tried again later."""


class RemoteStorageError(TransportError):
    """The other side's state folder cannot be written or is damaged; the same call may be tried again later."""
