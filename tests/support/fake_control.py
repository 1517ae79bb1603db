"""The control plane of the scripted coordinator: shows its view to whoever attends, keeps what it hears."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING

import grpc

from editpb import control_pb2, control_pb2_grpc
from editpb.control_messages import coordinator_message_to_pb, peer_message_from_pb
from editpb.messages import Goodbye, Heartbeat, Hello, Welcome

if TYPE_CHECKING:
    from tests.support.fake_coordinator import FakeCoordinator

RUN_ID = "run-0a1b2c3d"


class FakeControl(control_pb2_grpc.ControlServicer):
    def __init__(self, fake: FakeCoordinator) -> None:
        self._fake = fake

    async def Attend(
        self, requests: AsyncIterator[control_pb2.PeerMessage], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[control_pb2.CoordinatorMessage]:
        fake = self._fake
        hello = peer_message_from_pb(await anext(requests))
        assert isinstance(hello, Hello)
        if fake.refuse_attendance:
            await context.abort(*fake.refuse_attendance.pop(0))
        fake.io.change(lambda: fake.hellos.append(hello))
        welcome = Welcome(
            run_id=RUN_ID, peer_id=fake.peer_id, config_json=fake.config.to_json(), outer_step=fake.view.outer_step
        )
        yield coordinator_message_to_pb(welcome)
        if not hello.schema_hash:
            return
        changed = asyncio.Event()
        fake._changed.add(changed)
        listener = asyncio.create_task(self._listen(requests, changed))
        try:
            while not listener.done():
                if fake.expel is not None:
                    yield coordinator_message_to_pb(fake.expel)
                    return
                yield coordinator_message_to_pb(fake.io.read(lambda: fake.view))
                await changed.wait()
                changed.clear()
        finally:
            fake._changed.discard(changed)
            listener.cancel()

    async def _listen(self, requests: AsyncIterator[control_pb2.PeerMessage], changed: asyncio.Event) -> None:
        try:
            async for message in requests:
                self._fake.io.change(partial(self._heard, peer_message_from_pb(message)))
        finally:
            changed.set()

    def _heard(self, heard: Hello | Heartbeat | Goodbye) -> None:
        if isinstance(heard, Heartbeat):
            self._fake.heartbeats.append(heard)
            self._fake.on_heartbeat(self._fake, heard)
        elif isinstance(heard, Goodbye):
            self._fake.goodbyes.append(heard.reason)
