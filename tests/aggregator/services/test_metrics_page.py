"""/metrics as Prometheus' own parser reads it, the board and the alerts that use it, and who bothers its port."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from aggregator.run_feed import PeerReported
from aggregator.services.metrics_page import MetricsPage, RunCollector
from edit.errors import ConfigError
from editpb.messages import Heartbeat, PeerState
from tests.support.loops import on_a_loop, pass_time, run_held
from tests.support.served import TOML, Served, found_run, new_folder, served, theta

DOCKER = Path(__file__).parents[3] / "docker"
WITH_METRICS = TOML.replace("[server]\n", '[server]\nmetrics_listen = "127.0.0.1:0"\n')


async def ask(page: MetricsPage, request: str) -> tuple[int, str]:
    reader, writer = await asyncio.open_connection(*page.listen.rsplit(":", 1))
    writer.write(request.encode())
    head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    assert f"Content-Length: {len(body.encode())}" in head or request.startswith("HEAD")
    return int(head.split()[1]), body


async def get(page: MetricsPage, path: str) -> tuple[int, str]:
    return await ask(page, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n")


def page_of(at: Served) -> MetricsPage:
    page = at.coordinator.metrics_page
    assert page is not None
    return page


async def scraped(at: Served) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    code, text = await get(page_of(at), "/metrics")
    assert code == 200
    families = text_string_to_metric_families(text)
    return {(one.name, tuple(sorted(one.labels.items()))): one.value for each in families for one in each.samples}


@pytest.mark.parametrize("shared", [False, True])
def test_prometheus_reads_what_the_run_does_and_every_metric_of_board_and_alerts_exists(tmp_path: Path, shared: bool) -> None:
    toml = WITH_METRICS + f"\n[membership]\nshare_losses = {str(shared).lower()}\n"

    @on_a_loop
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run", toml=toml)) as at, at.peer("a") as a:
            before = await scraped(at)
            assert before["edit_phase", (("phase", "founding"),)] == 1
            view = await found_run(a)
            run = at.coordinator.run
            beat = Heartbeat(state=PeerState.TRAINING, inner_steps=3, loss=2.25)
            run.attendances.membership.members["a"].heartbeat = beat
            run.feed.publish(PeerReported("a", beat))
            for step in range(2):
                view = await a.view(lambda v, step=step: v.outer_step == step and v.round_id)
                await a.contribute(view.round_id, step, theta(step + 1))
                await a.view(lambda v, step=step: v.outer_step == step + 1)
            while run.history.committed < 2:  # noqa: ASYNC110
                await asyncio.sleep(0)
            run.history.eta_s = lambda *_: 90.0
            values = await scraped(at)
            a_ = (("member", "a"),)
            assert values["edit_outer_step", ()] == 2 and values["edit_outer_steps", ()] == 100
            assert values["edit_run_info", (("run_id", run.run_id),)] == 1
            assert values["edit_rounds_total", (("result", "committed"),)] == 2
            assert values["edit_rounds_total", (("result", "aborted"),)] == 0
            assert values["edit_tokens_total", ()] == 20 and values["edit_received_bytes_total", ()] > 2000
            assert values["edit_member_up", a_] == 1 and values["edit_member_contributions_total", a_] == 2
            assert values["edit_cosine", ()] == pytest.approx(1.0)
            assert values.get(("edit_member_loss", a_)) == (2.25 if shared else None)
            names = {name for name, _ in values} | {"edit_member_loss"}
            board = json.loads((DOCKER / "grafana.json").read_text())
            rules = yaml.safe_load((DOCKER / "alerts.yaml").read_text())["groups"][0]["rules"]
            used = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
            used += [rule["expr"] for rule in rules]
            asked = {name for expression in used for name in re.findall(r"\bedit_(?!swarm_)[a-z_]+", expression)}
            assert len(asked) > 15 and asked - names == set()

    scenario()


@on_a_loop
async def test_it_is_healthy_at_once_and_ready_when_members_can_connect(tmp_path: Path) -> None:
    async with served(new_folder(tmp_path / "run", toml=WITH_METRICS)) as at:
        page = page_of(at)
        assert await get(page, "/healthz") == (200, "ok\n") == await get(page, "/readyz?verbose=1")
        at.coordinator._serving = False
        assert await get(page, "/readyz") == (503, "starting\n")
        assert (await get(page, "/"))[0] == 404
        assert await ask(page, "HEAD /healthz HTTP/1.1\r\n\r\n") == (200, "")
        assert (await ask(page, "POST /metrics HTTP/1.1\r\n\r\n"))[0] == 405
    with pytest.raises(OSError):
        await get(page, "/healthz")


@on_a_loop
async def test_there_is_no_such_port_unless_the_operator_says_so_and_one_in_use_is_one_line(tmp_path: Path) -> None:
    async with served(new_folder(tmp_path / "run")) as at:
        assert at.coordinator.metrics_page is None
        collector = RunCollector(at.coordinator.run)
        taken = MetricsPage(collector, at.coordinator.listen, lambda: True, named="server.metrics_listen")
        with pytest.raises(ConfigError, match=r"server\.metrics_listen: 127\.0\.0\.1:\d+ cannot be bound"):
            await taken.start()
        await taken.close()
        for name in ("a..b", "x" * 70):  # that no host can have
            with pytest.raises(ConfigError, match=rf"server\.metrics_listen '{name}:0': must be HOST:PORT"):
                await MetricsPage(collector, f"{name}:0", lambda: True, named="server.metrics_listen").start()


def test_who_says_too_much_or_nothing_is_cut_off_and_no_more_than_some_at_a_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run", toml=WITH_METRICS)) as at:
            page = page_of(at)
            host, port = page.listen.rsplit(":", 1)
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 100_000)
            assert await reader.read() == b""
            writer.close()
            silent = [await asyncio.open_connection(host, port) for _ in range(32)]
            while len(page._open) < 32:  # noqa: ASYNC110 (where time stands still)
                await asyncio.sleep(0)
            reader, writer = await asyncio.open_connection(host, port)
            assert await reader.read() == b""
            writer.close()
            pass_time(6.0)
            for reader, writer in silent:
                assert await reader.read() == b""
                writer.close()
            assert (await get(page, "/healthz"))[0] == 200

    run_held(scenario())
