"""/metrics of a host, by Prometheus' own parser: the council as it sees it, and the rounds of the parts that it owns."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from aggregator.services.metrics_page import MetricsPage
from aggregator.swarm import process
from aggregator.swarm.host import Host
from aggregator.swarm.metrics import HostCollector, council_metrics
from aggregator.swarm.standing import GossipStanding
from aggregator.telemetry import RoundSpans
from edit.errors import ConfigError
from edit.telemetry import trace_id
from editpb.messages import Heartbeat, PeerState
from tests.aggregator.services.test_metrics_page import DOCKER, get
from tests.aggregator.swarm.test_operating import ONES, scenario
from tests.support.council.hosts import Hosts, hosts
from tests.support.loops import on_a_loop, run_held
from tests.support.telemetry import InMemory

Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def read(text: str) -> Values:
    samples = [(each, family) for family in text_string_to_metric_families(text) for each in family.samples]
    found = {(each.name, tuple(sorted(each.labels.items()))): each.value for each, _ in samples}
    assert len(found) == len(samples), "no sample is there twice"
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len({*names}), "each family is there once"
    return found


def scraped(host: Host | None) -> Values:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(HostCollector(lambda: host))
    return read(generate_latest(registry).decode())


def labels(**named: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(named.items()))


def test_a_host_tells_of_the_council_and_of_the_rounds_that_it_owns_only(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        await swarm.until(lambda: len({part.owner for part in swarm.record.parts}) == 2, passes=3.0)
        await swarm.contribute(0, ONES)
        await swarm.until(lambda: swarm.steps() == dict.fromkeys("abc", 1))
        await swarm.until(lambda: all(len(swarm.running["a"].council.known(p, 0).states) for p in "bc"), passes=1.0)
        await swarm.until(lambda: all(host.council.leader == "a" for host in swarm.running.values()), passes=1.0)
        values = {peer_id: scraped(host) for peer_id, host in swarm.running.items()}
        owners = [part.owner for part in swarm.record.parts]
        for peer_id, one in values.items():
            assert one["edit_swarm_info", labels(run_id=swarm.run_id, member=peer_id)] == 1
            assert one["edit_swarm_leader", labels(leader="a")] == one["edit_swarm_has_leader", ()] == 1
            assert one["edit_swarm_leads", ()] == (peer_id == "a")
            assert one["edit_swarm_term", ()] == swarm.running[peer_id].council.term
            assert one["edit_swarm_voters", ()] == one["edit_swarm_voters_connected", ()] == 3
            assert one["edit_swarm_votes", ()] == 1
            assert one["edit_swarm_phase", labels(phase="running")] == 1
            for number, owner in enumerate(owners):
                part = labels(part=str(number))
                assert one["edit_swarm_part_owner", labels(part=str(number), owner=owner)] == 1
                assert one["edit_swarm_part_outer_step", part] == one["edit_swarm_part_held_outer_step", part] == 1 - number
                assert one["edit_swarm_part_lag_steps", part] == 0
                assert one["edit_swarm_part_served", part] == (owner == peer_id)
                assert one.get(("edit_outer_step", part)) == (1 - number if owner == peer_id else None)
        first = values[owners[0]]
        assert first["edit_rounds_total", labels(part="0", result="committed")] == 1
        assert values["a"]["edit_swarm_member_lag_steps", labels(member="b", part="0")] == 0
        assert not any(name == "edit_swarm_member_lag_steps" for name, _ in values["b"]), "only the leader is told"

        await swarm.stop("c")
        await swarm.until(lambda: "c" not in swarm.running["a"].links.connected)
        left = scraped(swarm.running["a"])
        assert left["edit_swarm_member_connected", labels(member="c")] == 0
        assert left["edit_swarm_voters_connected", ()] == 2

    scenario(tmp_path, body, parts=2)


def test_losses_are_told_only_where_the_run_shares_them(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        await swarm.until(lambda: swarm.owner() is not None, passes=1.0)
        owner = swarm.owner()
        assert owner is not None
        async with swarm.peer(owner.peer_id, "p") as peer:
            await peer.attend()
            (run,) = [run for _, run in owner.served]
            run.attendances.membership.members["p"].heartbeat = Heartbeat(state=PeerState.TRAINING, inner_steps=3, loss=2.25)
            at = "edit_member_loss", labels(part="0", member="p")
            assert at not in (values := scraped(owner)) and values["edit_member_up", labels(part="0", member="p")] == 1
            run.config = replace(run.config, membership=replace(run.config.membership, share_losses=True))
            assert scraped(owner)[at] == 2.25

    scenario(tmp_path, body, members="a")


def test_a_lie_of_a_member_is_no_negative_lag_and_a_name_no_markup(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        await swarm.until(lambda: swarm.running["a"].standing().peers[0].states, passes=1.0)
        standing = swarm.running["a"].standing()
        (peer,) = standing.peers
        lies = replace(peer, peer_id='b"}\n1', states=((1 << 40, "f" * 64), *peer.states[1:], (7, ""), (8, "")))
        gossip = GossipStanding(
            outer_step=9, settlings=2, trains=True, partner="b", said="", distance=None, together=4, alone=3
        )
        registry = CollectorRegistry(auto_describe=False)

        class Lied:
            def collect(self) -> object:
                return council_metrics(replace(standing, peers=(lies,), gossip=gossip, record=standing.record))

        registry.register(Lied())  # type: ignore[arg-type]
        values = read(generate_latest(registry).decode())
        assert values["edit_swarm_member_lag_steps", labels(member='b"}\n1', part="0")] == 0
        assert len([name for name, _ in values if name == "edit_swarm_member_lag_steps"]) == 1, "no part that there is not"
        assert values["edit_swarm_gossip_swaps_total", labels(result="alone")] == 3
        assert ("edit_swarm_gossip_distance", ()) not in values
        assert all(math.isfinite(value) for value in values.values())

    scenario(tmp_path, body, members="ab")


def test_every_metric_of_a_swarm_that_alerts_and_board_use_exists(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        names = {name for name, _ in scraped(swarm.running["a"])}
        rules = yaml.safe_load((DOCKER / "alerts.yaml").read_text())["groups"][0]["rules"]
        board = json.loads((DOCKER / "grafana.json").read_text())
        used = [[rule["expr"] for rule in rules], [each["expr"] for panel in board["panels"] for each in panel["targets"]]]
        for expressions, most in zip(used, (2, 8), strict=True):
            asked = {name for expression in expressions for name in re.findall(r"\bedit_swarm_[a-z_]+", expression)}
            assert len(asked) >= most and asked - names == set()

    scenario(tmp_path, body, members="a")


def test_the_rounds_of_a_part_are_spans_of_its_owner(tmp_path: Path) -> None:
    memory = InMemory()

    async def run() -> None:
        async with hosts(tmp_path) as swarm:
            swarm.subscribers = lambda part: (RoundSpans(memory.telemetry, swarm.run_id, part).on_event,)
            await swarm.grow(*"ab")
            await swarm.contribute(0, ONES)
            await swarm.until(lambda: swarm.steps() == dict.fromkeys("ab", 1))
            await swarm.until(lambda: memory.spans("round"))
            (span,) = memory.spans("round")
            told = dict(span.attributes or {})
            assert (told["edit.part"], told["edit.outer_step"], told["edit.committed"]) == (0, 1, True)
            assert span.context is not None and span.context.trace_id == trace_id(swarm.run_id, 1)
            assert {each.name for each in (*memory.spans("merge"), *memory.spans("commit"))} == {"merge", "commit"}

    run_held(run())


@pytest.mark.parametrize("address", ["7702", "localhost:", ":7702", "127.0.0.1:70000", "127.0.0.1:²"])
def test_an_address_that_is_none_is_one_line(address: str) -> None:
    with pytest.raises(ConfigError, match=r"--metrics-listen .*: must be HOST:PORT"):
        process._metrics_page(address, lambda: None)


def test_the_page_is_healthy_before_the_host_is_there_and_ready_once_it_is_in_the_swarm(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        host: Host | None = None
        assert process._metrics_page("", lambda: host) is None
        page = process._metrics_page("127.0.0.1:0", lambda: host)
        assert page is not None
        await page.start()
        assert await get(page, "/healthz") == (200, "ok\n")
        assert await get(page, "/readyz") == (503, "starting\n") and read((await get(page, "/metrics"))[1]) == {}
        host = swarm.running["a"]
        assert await get(page, "/readyz") == (200, "ok\n")
        assert read((await get(page, "/metrics"))[1])["edit_swarm_leads", ()] == 1
        await page.close()

    scenario(tmp_path, body, members="a")


@on_a_loop
async def test_a_port_in_use_ends_the_host_before_it_takes_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = MetricsPage(HostCollector(lambda: None), "127.0.0.1:0", lambda: False, named="--metrics-listen")
    await taken.start()
    monkeypatch.setattr(process, "_stop_at_the_end", lambda *_: None)
    with pytest.raises(ConfigError, match=r"--metrics-listen: 127\.0\.0\.1:\d+ cannot be bound"):
        await process.serve_host(tmp_path, metrics_listen=taken.listen)
    await taken.close()
    assert not (tmp_path / "council.json").exists()
