"""The lab's connection to a run, with the operator's certificate: its status; and reading a snapshot off a data channel."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import torch
from blake3 import blake3
from torch import Tensor

from aggregator.storage.state_folder import StateFolder
from edit.errors import ConfigError, RemoteProtocolError, TransportError
from edit.fragments.schema import Schema
from edit.records import Snapshot
from edit.view.observations import Status
from editpb import control_pb2, control_pb2_grpc, data_pb2, tensors_pb2
from editpb.transport.channel_options import channel_options

__all__ = ["Observer", "open_observer", "read_snapshot"]

_MAX_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Observer:
    """Ask the coordinator; answers are None while it cannot be reached. timeout_s: of each call."""

    control: grpc.Channel
    timeout_s: float = 5.0

    def status(self) -> Status | None:
        """Return the present status."""
        stub: Any = control_pb2_grpc.ControlStub(self.control)
        try:
            reply = stub.Status(control_pb2.StatusRequest(rounds_after=1 << 62, brief=True), timeout=self.timeout_s)
        except grpc.RpcError:
            return None
        return Status(
            phase=control_pb2.RunPhase.Name(reply.view.phase).removeprefix("RUN_PHASE_").lower(),
            outer_step=reply.view.outer_step,
            digest=reply.view.digest,
            parameters=reply.parameters,
            deadline_s=reply.deadline_in_s if reply.deadline_in_s >= 0 else None,
            arrived=len(reply.arrived),
            expected=len(reply.expected),
            memory_bytes=reply.peak_memory_bytes,
            tokens=reply.tokens,
        )

    def warnings(self) -> tuple[str, ...]:
        """Return what the coordinator warns its operator of; nothing while it cannot be reached."""
        stub: Any = control_pb2_grpc.ControlStub(self.control)
        try:
            return tuple(stub.Status(control_pb2.StatusRequest(brief=True), timeout=self.timeout_s).warnings)
        except grpc.RpcError:
            return ()

    def evict(self, peer_id: str, reason: str) -> None:
        """Shut a member out for good. Raises TransportError when the coordinator does not."""
        stub: Any = control_pb2_grpc.ControlStub(self.control)
        try:
            stub.Evict(control_pb2.EvictRequest(peer_id=peer_id, reason=reason), timeout=self.timeout_s)
        except grpc.RpcError as error:
            raise TransportError(f"{peer_id} was not evicted: {error.details()}") from error

    def close(self) -> None:
        self.control.close()


def read_snapshot(stub: Any, run_id: str, schema: Schema, timeout_s: float) -> Snapshot:
    """Read the outer parameters of a snapshot: of the last outer step, or of an earlier one that others still read.

    timeout_s: of each call.

    Raises grpc.RpcError, RemoteProtocolError when they do not match the manifest.
    """
    manifest = stub.DescribeSnapshot(data_pb2.SnapshotManifestRequest(run_id=run_id), timeout=timeout_s)
    if len(manifest.fragment_hash) != len(schema.fragments) or schema.numel * 4 > _MAX_BYTES:
        raise RemoteProtocolError("the run's snapshot does not fit the lab's model")
    fragments = []
    for place, fragment in enumerate(schema.fragments):
        request = data_pb2.SnapshotRequest(run_id=run_id, outer_step=manifest.outer_step, fragment_id=fragment.fragment_id)
        chunks = stub.FetchSnapshot(request, timeout=timeout_s)
        fragments.append(_fragment(chunks, fragment.fragment_id, fragment.numel, manifest.fragment_hash[place]))
    return Snapshot(manifest.outer_step, manifest.digest, tuple(fragments))


def _fragment(chunks: Iterable[tensors_pb2.Chunk], fragment_id: int, numel: int, wanted: bytes) -> Tensor:
    data = bytearray()
    for chunk in chunks:
        if chunk.offset != len(data) or len(data) + len(chunk.data) > 4 * numel:
            raise RemoteProtocolError(f"snapshot of fragment {fragment_id}: chunks out of order, or too many bytes")
        data += chunk.data
    if blake3(data).digest() != wanted or len(data) != 4 * numel:
        raise RemoteProtocolError(f"snapshot of fragment {fragment_id}: damaged on the way")
    return torch.frombuffer(data, dtype=torch.float32)


def open_observer(state: Path) -> Observer:
    """Connect to the coordinator that serves the folder `state`, as its operator. Raises ConfigError when a file is missing."""
    try:
        folder = StateFolder(state)
        address = folder.bound()["listen"]
        ca, key, certificate = ((state / name).read_bytes() for name in ("ca.pem", "operator.key", "operator.pem"))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{state}: is not the folder of a served run ({error})") from error
    credentials = grpc.ssl_channel_credentials(ca, key, certificate)
    return Observer(grpc.secure_channel(address, credentials, options=channel_options(address)))
