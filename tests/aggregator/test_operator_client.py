"""What the operator's commands refuse before they call anybody, and what they end with."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from aggregator import operator_client
from aggregator.operator_client import evict_peer
from aggregator.swarm import operate
from edit.errors import BusyError, ConfigError, EditError, StorageError
from editpb import control_pb2_grpc
from editpb.transport.status import to_status


@pytest.mark.parametrize("name", ["", "a b", "../x", "universit\u00e9", "a" * 65])
def test_a_name_that_no_member_can_have_is_refused(tmp_path: Path, name: str) -> None:
    for order in (evict_peer, lambda *_: operate.share_authority(tmp_path, name)):
        with pytest.raises(ConfigError, match="must be 1 to 64 of A-Z a-z 0-9"):
            order(name, "key lost")


def test_a_reason_that_no_host_would_take_is_refused() -> None:
    evict_peer("a", "x" * 4096)
    with pytest.raises(ConfigError, match="the reason has 4097 characters, more than 4096"):
        evict_peer("a", "x" * 4097)


@pytest.mark.parametrize(("theirs", "code"), [(StorageError("orders.json: full"), 2), (BusyError("orders.json: full"), 69)])
def test_an_order_that_the_coordinators_disk_refuses_is_not_one_that_reached_nobody(
    monkeypatch: pytest.MonkeyPatch, theirs: EditError, code: int
) -> None:
    async def pause(stub: object) -> None:
        status, details = to_status(theirs)
        raise grpc.aio.AioRpcError(status, grpc.aio.Metadata(), grpc.aio.Metadata(), details)

    monkeypatch.setattr(control_pb2_grpc, "ControlStub", lambda channel: None)
    with pytest.raises(EditError, match=r"^orders\.json: full$") as raised:
        asyncio.run(operator_client._ask(cast("Any", contextlib.nullcontext), pause, "the coordinator"))
    assert raised.value.exit_code == code
