"""Which host is asked for a part."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from editpb.transport.parts import metadata_of_owner
from peers.carriers.swarm.channels import PartChannels

HOSTS = {"a": "127.0.0.1:1", "b": "127.0.0.1:2", "c": "127.0.0.1:3"}


def channels() -> PartChannels:
    return PartChannels("run", HOSTS, 0, grpc.ssl_channel_credentials())


def refusal(*metadata: Any) -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata(*metadata)
    return grpc.aio.AioRpcError(grpc.StatusCode.FAILED_PRECONDITION, grpc.aio.Metadata(), trailing, "part 0 is c's")


def test_the_owner_that_a_host_names_is_asked_next() -> None:
    part = channels()
    part.refused(refusal(*metadata_of_owner("c")))
    part.rotate()
    assert part.endpoint == HOSTS["c"]


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        metadata_of_owner("stranger"),
        metadata_of_owner("evil.example:443"),
        (*metadata_of_owner("c"), *metadata_of_owner("c")),
    ],
)
def test_else_all_hosts_are_asked_in_turn(metadata: Any) -> None:
    part, asked = channels(), []
    for _ in range(4):
        asked.append(part.endpoint)
        part.refused(refusal(*metadata))
        part.rotate()
    assert asked == [*HOSTS.values(), HOSTS["a"]]


def test_who_was_named_once_is_not_asked_for_ever() -> None:
    part = channels()
    part.refused(refusal(*metadata_of_owner("c")))
    part.rotate()
    part.rotate()
    assert part.endpoint == HOSTS["a"]
