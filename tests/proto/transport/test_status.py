"""Every status code means an error with a clear blame, and every error becomes a code that gives the same error back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from edit import errors
from edit.errors import (
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
from editpb.transport.status import ERRORS, from_rpc, from_status, handshake_refusal, swarm_refusal, to_status
from tests.support.loops import on_a_loop

CODES = list(grpc.StatusCode)
KINDS = [getattr(errors, name) for name in errors.__all__]


def test_every_status_code_is_mapped() -> None:
    assert set(ERRORS) == set(CODES)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("INVALID_ARGUMENT", RemoteProtocolError),
        ("OUT_OF_RANGE", RemoteProtocolError),
        ("DATA_LOSS", RemoteProtocolError),
        ("INTERNAL", RemoteProtocolError),
        ("UNIMPLEMENTED", RemoteProtocolError),
        ("FAILED_PRECONDITION", StaleError),
        ("NOT_FOUND", GoneError),
        ("ABORTED", StaleError),
        ("PERMISSION_DENIED", RefusedError),
        ("UNAUTHENTICATED", RefusedError),
        ("UNAVAILABLE", TransportError),
        ("DEADLINE_EXCEEDED", TransportError),
        ("CANCELLED", TransportError),
        ("RESOURCE_EXHAUSTED", TransportError),
        ("UNKNOWN", TransportError),
    ],
)
def test_blame_of_each_code(code: str, kind: type[EditError]) -> None:
    error = from_status(grpc.StatusCode[code], "why")
    assert type(error) is kind and str(error) == "why"


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_has_a_code_other_than_ok(kind: type[EditError]) -> None:
    code, details = to_status(kind("because"))
    assert code is not grpc.StatusCode.OK and details.endswith("because")


@pytest.mark.parametrize("kind", [RemoteProtocolError, StaleError, GoneError, RefusedError, EvictedError, TransportError])
def test_what_concerns_the_caller_comes_back_as_it_was(kind: type[EditError]) -> None:
    error = from_status(*to_status(kind("because")))
    assert type(error) is kind and str(error) == "because"


@pytest.mark.parametrize(
    ("kind", "seen"),
    [(StorageError, RemoteStorageError), (ConfigError, RemoteProtocolError), (LocalProtocolError, RemoteProtocolError)],
)
def test_the_other_sides_own_trouble_is_retried_or_blamed_on_it(kind: type[EditError], seen: type[EditError]) -> None:
    assert type(from_status(*to_status(kind("because")))) is seen


def test_what_is_gone_is_not_asked_for_again_as_what_is_stale_may_be() -> None:
    assert not issubclass(GoneError, StaleError) and not issubclass(StaleError, GoneError)
    assert issubclass(GoneError, OutdatedError) and issubclass(StaleError, OutdatedError)


def test_a_subclass_that_the_table_does_not_know_gets_its_parents_code() -> None:
    class Special(RefusedError):
        pass

    assert to_status(Special("no")) == (grpc.StatusCode.PERMISSION_DENIED, "no")


@pytest.mark.parametrize("code", CODES)
def test_details_become_one_printable_bounded_line(code: grpc.StatusCode) -> None:
    assert str(from_status(code, None)) == str(from_status(code, "")) == code.name.lower().replace("_", " ")
    text = str(from_status(code, "a\nb\x1b[31m" + "x" * 9999))
    assert text.isprintable() and text.startswith("a b ") and len(text) <= 1024


def test_who_does_not_listen_is_told_without_the_words_of_grpc() -> None:
    said = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:7700: Failed to connect to remote host: "
    for refused in ("Connection refused", "connect: Connection refused (111)"):  # of grpcio 1.85 and 1.76
        error = from_status(grpc.StatusCode.UNAVAILABLE, f"{said}{refused}")
        assert type(error) is TransportError and str(error) == "cannot be reached (connection refused)"
    of_tls = f"{said.partition('ipv4')[0]}Ssl handshake failed: CERTIFICATE_VERIFY_FAILED"
    assert str(from_status(grpc.StatusCode.UNAVAILABLE, of_tls)) == of_tls, "others look for what it says"


def test_a_name_that_does_not_resolve_is_told_without_the_words_of_grpc() -> None:
    said = "errors resolving a.b:31: [field:hostname lookup error:address lookup failed for a.b:31"
    for words, reason in (
        (" os_error: Name or service not known syscall: getaddrinfo]", "name or service not known"),
        (": Domain name not found]", "domain name not found"),  # by gRPC's own resolver
    ):
        error = from_status(grpc.StatusCode.UNAVAILABLE, said + words)
        assert type(error) is TransportError and str(error) == f"the name a.b cannot be looked up ({reason})"


def test_at_a_swarm_a_stranger_may_be_one_that_has_another_authority_now() -> None:
    of_tls = "Ssl handshake failed: SSL_ERROR_SSL: ...:CERTIFICATE_VERIFY_FAILED"
    said = "its certificate is not from this run's authority (is another run served there?)"
    assert handshake_refusal(of_tls) == said
    assert (
        swarm_refusal(of_tls)
        == f"{said}; after `new-authority` an observer, or a member that was away, needs another invitation"
    )
    expired = "certificate has expired: CERTIFICATE_VERIFY_FAILED"
    assert swarm_refusal(expired) == handshake_refusal(expired) and swarm_refusal("no route to host") is None


def test_an_exception_of_grpc_is_translated() -> None:
    empty = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(grpc.StatusCode.NOT_FOUND, empty, empty, details="update 3 is no longer kept")
    assert repr(from_rpc(error)) == "GoneError('update 3 is no longer kept')"
    assert isinstance(from_rpc(grpc.RpcError("odd")), TransportError)


@on_a_loop
async def test_who_ends_a_call_while_it_is_written_to_is_heard() -> None:
    """grpc.aio alone loses most of these statuses, and says that there was an internal error: see early_status.py."""

    async def refuse(messages: object, context: Any) -> AsyncIterator[bytes]:
        await context.abort(*to_status(StaleError("the round is over")))
        yield b""

    async def written() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"more"

    server = grpc.aio.server()
    handlers = {"Call": grpc.stream_stream_rpc_method_handler(refuse)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    seen = set()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for _ in range(20):
            try:
                async for _ in channel.stream_stream("/test/Call")(written()):
                    raise AssertionError
            except grpc.aio.AioRpcError as error:
                seen.add(repr(from_rpc(error)))
    await server.stop(None)
    assert seen == {"StaleError('the round is over')"}


def test_a_call_whose_status_never_came_is_blamed_for_nothing_else() -> None:
    lost = from_status(grpc.StatusCode.INTERNAL, "Internal error from Core")
    assert repr(lost) == "TransportError('the other side ended the call while it was written to')"
