"""What is measured over links: every kind of transfer goes through, and every heartbeat that is said is found again."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from edit.errors import TransportError
from edit.lab.bench import links
from edit.lab.bench.links import heartbeat_delays, link_rates
from edit.lab.link import LinkShape


@pytest.mark.exhaustive
@pytest.mark.timeout(120)
def test_all_transfers_are_measured_beside_raw_tcp() -> None:
    shape = LinkShape(up_bits_per_s=1e9, down_bits_per_s=1e9, latency_s=0.001, queue_bytes=1 << 16)
    rates = link_rates(shape, payload_bytes=400_000, fragments=3, repeats=2)
    assert rates.payload_bytes == 399_996
    for each in (rates.raw_up, rates.raw_down, rates.contribution, rates.update, rates.snapshot):
        assert len(each) == 2 and min(each) > 0
    assert rates.share("snapshot") == pytest.approx(rates.snapshot[1] / rates.raw_down[1])


@pytest.mark.exhaustive
@pytest.mark.timeout(120)
def test_heartbeats_are_timed_before_and_while_data_is_on_the_link() -> None:
    shape = LinkShape(up_bits_per_s=4e6, down_bits_per_s=4e6, latency_s=0.01, queue_bytes=1 << 16)
    delays = heartbeat_delays(shape, payload_bytes=600_000, fragments=3, idle_s=1.0)
    assert min(*delays.idle_s, *delays.busy_s) > 0
    assert delays.up_mbit > 0


@pytest.mark.exhaustive
@pytest.mark.timeout(120)
@pytest.mark.parametrize("measure", [heartbeat_delays, link_rates])
def test_a_contribution_that_is_not_sent_in_time_is_no_rate(measure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what reads snapshots meanwhile ends."""
    real = links.IoThread.wait

    def wait(self: links.IoThread, look: Any, timeout: float | None = None) -> Any:
        sending = timeout == 600.0 and look.__code__.co_filename == links.__file__
        return None if sending else real(self, look, timeout)

    monkeypatch.setattr(links.IoThread, "wait", wait)
    shape = LinkShape(up_bits_per_s=1e9, down_bits_per_s=1e9, latency_s=0.001, queue_bytes=1 << 16)
    options = {"idle_s": 0.0} if measure is heartbeat_delays else {"repeats": 1}
    with pytest.raises(TransportError, match="a contribution was not sent within 600 s"):
        measure(shape, payload_bytes=400_000, fragments=1, **options)
    assert "snapshots" not in [thread.name for thread in threading.enumerate()]


def test_a_contribution_may_take_longer_over_a_slow_link() -> None:
    schema = links._schema(25_000_000, 1)
    shape = LinkShape(up_bits_per_s=1e5, down_bits_per_s=1e5, latency_s=0.01, queue_bytes=1 << 16)
    assert links._within_s(shape, schema) == pytest.approx(6000.0)
