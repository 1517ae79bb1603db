"""The lab's client against a small real gRPC server on loopback, without TLS."""

from concurrent import futures

import grpc
import pytest
import torch
from blake3 import blake3

from edit.errors import ConfigError, RemoteProtocolError
from edit.fragments.schema import plan_fragments
from edit.lab.observer import Observer, open_observer, read_snapshot
from editpb import control_pb2, control_pb2_grpc, data_pb2, data_pb2_grpc, tensors_pb2

VALUES = [torch.arange(5.0), torch.tensor([2.5, -1.0])]
SCHEMA = plan_fragments([("a.weight", torch.nn.Parameter(torch.zeros(5))), ("b.weight", torch.nn.Parameter(torch.zeros(2)))])


class Control(control_pb2_grpc.ControlServicer):
    def Status(self, request, context):
        view = control_pb2.View(phase=control_pb2.RUN_PHASE_COLLECTING, outer_step=7, digest="d7")
        return control_pb2.StatusReply(view=view, parameters=7, deadline_in_s=-1, expected=["a", "b"], arrived=["a"])


class Data(data_pb2_grpc.DataServicer):
    def __init__(self) -> None:
        self.payloads = [tensor.numpy().tobytes() for tensor in VALUES]
        self.offset_shift = 0

    def DescribeSnapshot(self, request, context):
        hashes = [blake3(tensor.numpy().tobytes()).digest() for tensor in VALUES]
        return data_pb2.SnapshotManifest(outer_step=7, digest="d7", fragment_hash=hashes)

    def FetchSnapshot(self, request, context):
        payload = self.payloads[request.fragment_id]
        for start in range(0, len(payload), 8):
            yield tensors_pb2.Chunk(offset=start + self.offset_shift, data=payload[start : start + 8])


@pytest.fixture
def served():
    data = Data()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    control_pb2_grpc.add_ControlServicer_to_server(Control(), server)
    data_pb2_grpc.add_DataServicer_to_server(data, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    observer = Observer(grpc.insecure_channel(address))
    with grpc.insecure_channel(address) as channel:
        yield observer, data, server, lambda schema: read_snapshot(data_pb2_grpc.DataStub(channel), "run-1", schema, 5.0)
    observer.close()
    server.stop(None).wait()


def test_status_as_plain_values(served):
    observer, *_ = served
    status = observer.status()
    assert (status.phase, status.outer_step, status.digest, status.parameters) == ("collecting", 7, "d7", 7)
    assert (status.deadline_s, status.arrived, status.expected) == (None, 1, 2)


def test_a_snapshot_arrives_to_the_bit(served):
    *_, read = served
    snapshot = read(SCHEMA)
    assert (snapshot.outer_step, snapshot.digest) == (7, "d7")
    assert all(torch.equal(got, sent) for got, sent in zip(snapshot.fragments, VALUES, strict=True))


def test_a_damaged_snapshot_is_the_other_sides_fault(served):
    _, data, _, read = served
    data.payloads[1] = b"\0" * 8
    with pytest.raises(RemoteProtocolError, match="fragment 1: damaged"):
        read(SCHEMA)
    data.payloads[0] = b"\0" * 28
    with pytest.raises(RemoteProtocolError, match="too many bytes"):
        read(SCHEMA)
    data.offset_shift = 1
    with pytest.raises(RemoteProtocolError, match="out of order"):
        read(SCHEMA)


def test_a_snapshot_of_another_model_does_not_fit(served):
    *_, read = served
    other = plan_fragments([("a.weight", torch.nn.Parameter(torch.zeros(5)))])
    with pytest.raises(RemoteProtocolError, match="does not fit"):
        read(other)


def test_a_coordinator_that_is_away_gives_no_answer(served):
    observer, _, server, _ = served
    server.stop(None).wait()
    assert observer.status() is None


def test_a_folder_without_a_served_run_is_named(tmp_path):
    with pytest.raises(ConfigError, match=str(tmp_path)):
        open_observer(tmp_path)
