"""A cut in the midst of a transfer: what has arrived is not sent again. A real coordinator and peer, with a link between."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from edit.codecs import codec
from edit.fragments.digest import digest
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from edit.lab.link import Link, LinkShape
from edit.records import Committed, Contribution
from editpb.identity import Identity
from peers.carriers.hub.channels import Channels
from peers.carriers.hub.collective import HubCollective
from peers.carriers.io_thread import IoThread
from tests.support.running import address, running
from tests.support.served import new_folder

NUMEL = 3 << 20  # one fragment of 12 MB
SCHEMA = Schema((FragmentSpec(fragment_id=0, name="w", tensors=(TensorSpec(name="w", shape=(NUMEL,)),)),))
TOTAL = 4 * NUMEL
AGAIN = 3 << 20  # bytes: of one chunk, and what the link's and the kernel's buffers held when it was cut
SLOW = LinkShape(up_bits_per_s=64e6, down_bits_per_s=64e6)  # a second and a half for all


@contextmanager
def peer_behind_a_link(tmp_path: Path) -> Iterator[tuple[HubCollective, Link]]:
    folder = new_folder(tmp_path / "run")
    with running(folder) as here:
        host, _, port = address(folder).rpartition(":")
        with Link((host, int(port)), SLOW) as link, IoThread() as io:
            credentials = here.served.credentials("me")
            channels = Channels([f"127.0.0.1:{link.port}"], credentials)
            collective = HubCollective(io, channels, Identity(folder.run_id, "peer", "me"))
            try:
                yield collective, link
            finally:
                collective.close()


@contextmanager
def cut_once(link: Link, way: int) -> Iterator[Callable[[], int]]:
    """Cut the link once when half of the transfer has passed; yield what counts the bytes since the start."""
    start, done = link.carried_bytes[way], threading.Event()
    at = list[int]()

    def watch() -> None:
        while link.carried_bytes[way] - start < TOTAL // 2 and not done.wait(0.001):
            pass
        if not done.is_set():
            at.append(link.carried_bytes[way] - start)
            link.cut()
            link.repair()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lambda: link.carried_bytes[way] - start
    finally:
        done.set()
        thread.join()
    assert at and at[0] < TOTAL, "it was not cut on the way"


def theta() -> list[torch.Tensor]:
    return [torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))]


@pytest.mark.timeout(120)
def test_a_founder_goes_on_where_it_was_cut_off(tmp_path: Path) -> None:
    with peer_behind_a_link(tmp_path) as (collective, link), cut_once(link, way=0) as carried:
        snapshot = collective.join(SCHEMA, theta)
        assert snapshot.digest == digest(theta())
        assert carried() < TOTAL + AGAIN


@pytest.mark.timeout(120)
def test_so_do_a_snapshot_a_contribution_and_an_update_of_one_fragment(tmp_path: Path) -> None:
    with peer_behind_a_link(tmp_path) as (collective, link):
        collective.join(SCHEMA, theta)
        with cut_once(link, way=1) as carried:
            assert collective.snapshot().digest == digest(theta())
            assert carried() < TOTAL + AGAIN
        payload = codec("fp32").encode(theta()[0], SCHEMA.fragments[0])
        with cut_once(link, way=0) as carried:
            collective.contribute(Contribution(outer_step=0, fragment_id=0, inner_steps=1, tokens=1, payload=payload))
            with cut_once(link, way=1) as carried_down:
                assert isinstance(collective.outcome(0, block=True), Committed)
                assert carried_down() < TOTAL + AGAIN
            assert carried() < TOTAL + AGAIN
