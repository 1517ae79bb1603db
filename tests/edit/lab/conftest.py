"""A state as a demo fills it: four peers, a NaN, a huge norm, a kill, a lone peer. A skip where links cannot be limited."""

import math
from collections.abc import Callable

import pytest

from edit.errors import ConfigError
from edit.lab.network import Network
from edit.view.observations import Status
from edit.view.state import RunState

PEERS = [f"peer-{index}" for index in range(4)]


def fill(state: RunState, step: int) -> None:
    t, loss = 100.0 + 3 * step, 1.8 + 4 * math.exp(-step / 6)
    for place, peer_id in enumerate(PEERS):
        if peer_id == "peer-2" and step in (7, 8):
            continue
        line = {
            "kind": "peer",
            "t": t,
            "peer_id": peer_id,
            "state": "training",
            "outer_step": step - 1,
            "inner_steps": 30 * step,
        }
        traffic = {"bytes_sent": 870_000 * step, "bytes_received": 1_740_000 * step}
        state.apply({**line, **traffic, "loss": loss + 0.05 * place, "tokens_per_s": 5120.0, "digest": f"d{step - 1}"})
        own = {"t": t, "peer_id": peer_id, "step": 30 * step, "loss": loss + 0.05 * place}
        state.apply({"kind": "step", **own})
    peers: dict[str, list[object]] = {peer_id: ["ok", 1.0, 0.25] for peer_id in PEERS}
    if step == 4:
        peers["peer-3"] = ["nonfinite", None, 0.0]
    if step == 5:
        peers["peer-3"] = ["anomalous", 900.0, 0.0]
    if step in (7, 8):
        del peers["peer-2"]
    fragment = {"fragment_id": 0, "merged_norm": 1.0, "clip": 1.0, "peers": peers}
    row = {"kind": "round", "t": t + 1, "round_id": 1_000_000 + step, "outer_step": step, "committed": True, "seconds": 2.9}
    reason = "deadline with a quorum of 3" if step == 7 else "every expected peer has delivered"
    sizes = {"bytes_in": 3_480_000, "bytes_out": 1_740_000, "missing": [], "digest": f"d{step}"}
    state.apply({**row, **sizes, "reason": reason, "verdicts": [fragment]})
    state.apply({"kind": "lone", "t": t, "step": 30 * step, "loss": loss + 0.1})
    if step % 2:
        state.apply({"kind": "validation", "t": t, "who": "outer", "step": 30 * step, "loss": loss - 0.1})


@pytest.fixture
def make_state() -> Callable[[int], RunState]:
    def make(steps: int = 10, outer_steps: int = 10) -> RunState:
        state = RunState(PEERS, outer_steps, 30)
        for step in range(1, steps + 1):
            fill(state, step)
        state.apply({"kind": "event", "t": 101.0, "text": "4 peers train", "tone": "info"})
        state.apply({"kind": "event", "t": 113.5, "text": "peer-3 sent NaN & more", "tone": "good"})
        state.apply({"kind": "event", "t": 121.0, "text": "SIGKILL to peer-2", "tone": "fault"})
        state.status = Status(
            phase="collecting",
            outer_step=steps,
            digest=f"d{steps}",
            parameters=868_000,
            deadline_s=4.2,
            arrived=2,
            expected=3,
            memory_bytes=300_000_000,
        )
        return state

    return make


@pytest.fixture(scope="session")
def limited_links() -> None:
    """Skip the test where this machine cannot make links of a limited rate: that needs root."""
    try:
        with Network(["tried"], 1000.0):
            pass
    except ConfigError as error:
        pytest.skip(str(error))
