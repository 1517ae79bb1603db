"""One table between gRPC's status codes and the errors of this project, both ways: a code says whose fault it was."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from types import MappingProxyType

import grpc

from edit.errors import (
    BusyError,
    ConfigError,
    EditError,
    EvictedError,
    GoneError,
    LocalProtocolError,
    OutdatedError,
    RefusedError,
    RemoteProtocolError,
    RemoteStorageError,
    StaleError,
    StorageError,
    TransportError,
)
from editpb.limits import one_line
from editpb.transport.early_status import keep_early_statuses

__all__ = [
    "ERRORS",
    "StrangerError",
    "from_rpc",
    "from_status",
    "handshake_refusal",
    "none_answered",
    "swarm_refusal",
    "to_status",
]

MAX_DETAILS_CHARS = 1024  # HTTP/2 trailers are bounded to a few KiB
_EVICTED = "evicted: "  # tells an eviction from another refusal under the same code
_STORAGE = "storage: "  # likewise a disk from too many calls

ERRORS: Mapping[grpc.StatusCode, type[EditError]] = MappingProxyType(
    {
        grpc.StatusCode.OK: LocalProtocolError,  # not an error: asking for one is our bug
        grpc.StatusCode.INVALID_ARGUMENT: RemoteProtocolError,
        grpc.StatusCode.OUT_OF_RANGE: RemoteProtocolError,
        grpc.StatusCode.DATA_LOSS: RemoteProtocolError,
        grpc.StatusCode.ALREADY_EXISTS: RemoteProtocolError,
        grpc.StatusCode.INTERNAL: RemoteProtocolError,
        grpc.StatusCode.UNIMPLEMENTED: RemoteProtocolError,
        grpc.StatusCode.FAILED_PRECONDITION: StaleError,
        grpc.StatusCode.NOT_FOUND: GoneError,
        grpc.StatusCode.ABORTED: StaleError,
        grpc.StatusCode.PERMISSION_DENIED: RefusedError,
        grpc.StatusCode.UNAUTHENTICATED: RefusedError,
        grpc.StatusCode.UNAVAILABLE: TransportError,
        grpc.StatusCode.DEADLINE_EXCEEDED: TransportError,
        grpc.StatusCode.CANCELLED: TransportError,
        grpc.StatusCode.RESOURCE_EXHAUSTED: TransportError,
        grpc.StatusCode.UNKNOWN: TransportError,
    }
)
_CODES: Mapping[type[EditError], grpc.StatusCode] = MappingProxyType(
    {
        RemoteProtocolError: grpc.StatusCode.INVALID_ARGUMENT,
        OutdatedError: grpc.StatusCode.FAILED_PRECONDITION,
        StaleError: grpc.StatusCode.FAILED_PRECONDITION,
        GoneError: grpc.StatusCode.NOT_FOUND,
        RefusedError: grpc.StatusCode.PERMISSION_DENIED,
        EvictedError: grpc.StatusCode.PERMISSION_DENIED,
        TransportError: grpc.StatusCode.UNAVAILABLE,
        BusyError: grpc.StatusCode.RESOURCE_EXHAUSTED,
        StorageError: grpc.StatusCode.RESOURCE_EXHAUSTED,  # a full disk may have room again later
        ConfigError: grpc.StatusCode.INTERNAL,  # of this side; the caller can do nothing about it
        LocalProtocolError: grpc.StatusCode.INTERNAL,
        EditError: grpc.StatusCode.INTERNAL,
    }
)

keep_early_statuses()  # whoever reads a status here is to read the one that was sent

# With this status grpc.aio ends a call that ended while this side was writing to it, where no status of the other side came.
_LOST_STATUS = (grpc.StatusCode.INTERNAL, "Internal error from Core")

_PROXY = re.compile(r"(\S+): HTTP proxy returned response code (\d+)")  # as gRPC says it
_PROXY_WORDS = {
    "403": "it does not let this machine connect to that address and port",
    "407": "it asks for a user and a password: https_proxy=http://USER:PASSWORD@HOST:PORT",
}

_UNREACHED = re.compile(  # likewise; older ones name the call and the number
    r"failed to connect to all addresses; .*\bFailed to connect to remote host: (?:connect: )?(.+?)(?: \(\d+\))?"
)

_UNRESOLVED = re.compile(  # likewise, by the system's resolver and by gRPC's own
    r"errors resolving (\S+):\d+: .*?(?:\bos_error: (.+?) syscall|lookup failed for \S+: ([^\]]+)).*"
)

HANDSHAKE_WORDS = {  # the first that fits
    "certificate has expired": "its certificate has expired, or this machine's clock is ahead",
    "certificate is not yet valid": "its certificate is not valid yet by this machine's clock, which is behind: set it",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not from this run's authority (is another run served there?)",
    "UNKNOWN_CA": "the coordinator does not accept this peer's certificate",
    "CERTIFICATE_REQUIRED": "the coordinator asks for a certificate",
    "Hostname Verification": "the coordinator's certificate does not name the address connected to (server.advertise)",
}


class StrangerError(RefusedError):
    """The handshake failed: one side does not take the other's certificate. At another address it may."""


def to_status(error: EditError) -> tuple[grpc.StatusCode, str]:
    """Return (code, details) with which a servicer aborts a call because of `error`."""
    kind = next(kind for kind in type(error).__mro__ if kind in _CODES)
    prefix = _EVICTED if isinstance(error, EvictedError) else _STORAGE if isinstance(error, StorageError) else ""
    return _CODES[kind], one_line(f"{prefix}{error}", MAX_DETAILS_CHARS)


def from_status(code: grpc.StatusCode, details: str | None) -> EditError:
    """Return the error that a failed call with this status means; its message is one line."""
    text = one_line(details or "", MAX_DETAILS_CHARS) or code.name.lower().replace("_", " ")
    if (code, text) == _LOST_STATUS:
        return TransportError("the other side ended the call while it was written to")
    if code is grpc.StatusCode.PERMISSION_DENIED and text.startswith(_EVICTED):
        return EvictedError(text.removeprefix(_EVICTED))
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and text.startswith(_STORAGE):
        return RemoteStorageError(text.removeprefix(_STORAGE))
    if code is grpc.StatusCode.UNAVAILABLE and (proxy := _PROXY.search(text)) is not None:
        place, answer = proxy[1].removeprefix("ipv4:").removeprefix("ipv6:"), proxy[2]
        return TransportError(f"the HTTP proxy {place} answers {answer}: {_PROXY_WORDS.get(answer, 'it does not connect')}")
    if code is grpc.StatusCode.UNAVAILABLE and (unreached := _UNREACHED.fullmatch(text)) is not None:
        return TransportError(f"cannot be reached ({unreached[1].lower()})")
    if code is grpc.StatusCode.UNAVAILABLE and (unresolved := _UNRESOLVED.fullmatch(text)) is not None:
        return TransportError(f"the name {unresolved[1]} cannot be looked up ({(unresolved[2] or unresolved[3]).lower()})")
    return ERRORS[code](text)


def from_rpc(error: grpc.RpcError) -> EditError:
    """Return the error behind the exception that a stub of grpc or grpc.aio raised."""
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return TransportError(one_line(str(error), MAX_DETAILS_CHARS) or "the call failed")
    return from_status(error.code(), error.details())


def handshake_refusal(details: str) -> str | None:
    """Return in one line which certificate was refused; None when the `details` of a failed call are about something else."""
    return next((meaning for word, meaning in HANDSHAKE_WORDS.items() if word in details), None)


def none_answered(failures: Collection[tuple[str, bool]]) -> EditError:
    """Return the error of one that has tried all addresses: RefusedError where a stranger is at each of them.

    failures: why it failed at each address, and whether its handshake did.
    """
    kind = RefusedError if all(stranger for _, stranger in failures) else TransportError
    return kind("; ".join(why for why, _ in failures))


def swarm_refusal(details: str) -> str | None:
    """As `handshake_refusal`, at a host of a swarm: its members may have got a new authority meanwhile."""
    meaning = handshake_refusal(details)
    if meaning != HANDSHAKE_WORDS["CERTIFICATE_VERIFY_FAILED"]:
        return meaning
    return f"{meaning}; after `new-authority` an observer, or a member that was away, needs another invitation"
