"""What is measured over links: every kind of transfer goes through, and every heartbeat that is said is found again."""

from __future__ import annotations

import pytest

from edit.lab.bench.links import heartbeat_delays, link_rates
from edit.lab.link import LinkShape


@pytest.mark.timeout(120)
def test_all_transfers_are_measured_beside_raw_tcp() -> None:
    shape = LinkShape(up_bits_per_s=1e9, down_bits_per_s=1e9, latency_s=0.001, queue_bytes=1 << 16)
    rates = link_rates(shape, payload_bytes=400_000, fragments=3, repeats=2)
    assert rates.payload_bytes == 399_996
    for each in (rates.raw_up, rates.raw_down, rates.contribution, rates.update, rates.snapshot):
        assert len(each) == 2 and min(each) > 0
    assert rates.share("snapshot") == pytest.approx(rates.snapshot[1] / rates.raw_down[1])


@pytest.mark.timeout(120)
def test_heartbeats_are_timed_before_and_while_data_is_on_the_link() -> None:
    shape = LinkShape(up_bits_per_s=4e6, down_bits_per_s=4e6, latency_s=0.01, queue_bytes=1 << 16)
    delays = heartbeat_delays(shape, payload_bytes=600_000, fragments=3, idle_s=1.0)
    assert min(*delays.idle_s, *delays.busy_s) > 0
    assert delays.up_mbit > 0
