"""The exception tree. An exception carries blame; a lost round is a value (`Aborted`), not an exception.

EditError
 ├─ ConfigError           the user's setting, file or command line; exit code 2
 ├─ RefusedError          the other side said no for good (invitation, certificate, schema); exit code 3
 ├─ EvictedError          this peer was evicted from the run; exit code 4
 ├─ LocalProtocolError    our own bug: a call out of order; exit code 70
 ├─ RemoteProtocolError   the other side sent something it must not send; never touches state
 ├─ StaleError            what was asked about is over or not yet due: look at the view, then ask again
 │   └─ GoneError         no longer kept (an old update, an old snapshot)
 ├─ StorageError          the disk under the state folder failed or lies (full, torn, flipped); nothing is lost
 ├─ FormatError           a file is of another format than this software reads; exit code 2
 └─ TransportError        the link broke; the same call may be tried again; exit code 69
"""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "EditError",
    "EvictedError",
    "FormatError",
    "GoneError",
    "LocalProtocolError",
    "RefusedError",
    "RemoteProtocolError",
    "StaleError",
    "StorageError",
    "TransportError",
]


class EditError(Exception):
    """Base of every error this project raises on purpose. The message is one line."""

    exit_code = 70


class ConfigError(EditError):
    """A setting, a file or an argument is wrong. The message names the field or file, and the mend."""

    exit_code = 2


class RefusedError(EditError):
    """The other side refuses for good: retrying the same call cannot succeed."""

    exit_code = 3


class EvictedError(EditError):
    """The operator evicted this peer from the run."""

    exit_code = 4


class LocalProtocolError(EditError):
    """A call out of order by this process: a bug in the caller."""


class RemoteProtocolError(EditError):
    """The other side broke the protocol. Its bytes touched nothing."""


class StaleError(EditError):
    """The request was in order but does not fit the run as it stands: look at the view, then ask again."""


class GoneError(StaleError):
    """What was asked for is no longer kept."""


class StorageError(EditError):
    """The state folder cannot be written or its contents are damaged."""

    exit_code = 2


class FormatError(EditError):
    """A file is of another format than this software reads. It is whole: no code may pass it over as damaged."""

    exit_code = 2


class TransportError(EditError):
    """The connection failed or timed out; the same call may be tried again."""

    exit_code = 69
