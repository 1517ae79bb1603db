"""`edit-peer consent` and policy.toml with a coordinator: what a site does not allow ends its peer, whenever it is told."""

from __future__ import annotations

import datetime
import json
import math
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import grpc
import pytest
import torch
from torch import nn, optim
from typer.testing import CliRunner

from aggregator.control.status import run_status
from aggregator.storage.state_folder import StateFolder
from edit import EditWorker, WorkerConfig
from edit.config.run import RunConfig
from edit.errors import ConfigError, EditError, EvictedError, RefusedError, TransportError
from edit.trust.signatures import Signer
from editpb.audit_log import LogVerifier
from editpb.consents import signed_consent
from editpb.control_messages import peer_message_to_pb
from editpb.messages import DataStatement, Expel
from editpb.signed_contributions import ContributionSigner
from peers.cli import app
from peers.connection import connect
from peers.identity.policy import SitePolicy, digest_of
from tests.integration.test_readme import run
from tests.support.keys import member_key
from tests.support.loops import on_a_loop, until
from tests.support.running import address, running
from tests.support.served import TOML as SERVED_TOML
from tests.support.served import BarePeer, new_folder, served, theta

TOML = """
name = "consented"
[model]
name = "entry:mine"
[sync]
every = 2
outer_steps = 50
[rounds]
start_peers = 1
quorum = 1
grace_s = 0.2
[server]
listen = "127.0.0.1:0"
enrol_listen = "127.0.0.1:0"
"""


def joined(folder: StateFolder, home: Path) -> Path:
    invitation = run(["edit-coordinator", "invite", home.name, "--state", str(folder.path)])
    run(["edit-peer", "join", invitation.splitlines()[0], "--home", str(home)])
    return home


def consent(home: Path, *options: str) -> str:
    result = CliRunner().invoke(app, ["consent", "--home", str(home), *options])
    if isinstance(result.exception, EditError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


@contextmanager
def training(home: Path) -> Iterator[EditWorker]:
    model = nn.Linear(4, 2)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with connect(home) as (collective, config), EditWorker(model, optimizer, collective, WorkerConfig.of(config)) as worker:
        worker.step = lambda: (model(torch.ones(4)).sum().backward(), optimizer.step(), optimizer.zero_grad())  # type: ignore[attr-defined]
        yield worker


def change(folder: StateFolder, old: str, new: str) -> None:
    path = folder.path / "run.toml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_a_peer_takes_part_under_the_configuration_that_its_site_consented_to(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", toml=TOML)
    with running(folder):
        home = joined(folder, tmp_path / "a")
        (home / "policy.toml").write_text('[accept]\nauto = ["rounds.grace_s"]\n[limits]\nmodels = ["entry:*"]\n')
        with (
            pytest.raises(ConfigError, match="nobody at this site has consented to the run's configuration sha256:"),
            training(home),
        ):
            pass
        with pytest.raises(ConfigError, match="nobody can be asked; consent with: --accept sha256:"):
            consent(home)
        with pytest.raises(ConfigError, match=f"--accept sha256:{'0' * 64}: the run's configuration is sha256:"):
            consent(home, "--accept", f"sha256:{'0' * 64}")
        shown = CliRunner().invoke(app, ["consent", "--home", str(home)]).stdout
        (digest,) = (line.removeprefix("configuration ") for line in shown.splitlines() if line.startswith("configuration "))
        assert 'model.name = "entry:mine" (default "builtin:gpt")' in shown and "policy.toml allows it" in shown
        consent(home, "--accept", digest)
        assert "this site has consented to it" in CliRunner().invoke(app, ["consent", "--home", str(home)]).stdout
        with training(home) as worker:
            assert worker.outer_step == 0


def test_a_peer_ends_when_a_coordinator_comes_back_with_what_its_site_does_not_allow(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", toml=TOML)
    with running(folder):
        home, there = joined(folder, tmp_path / "a"), address(folder)
        shown = CliRunner().invoke(app, ["consent", "--home", str(home)]).stdout
        consent(home, "--accept", shown.splitlines()[2].removeprefix("configuration "))
    change(folder, 'listen = "127.0.0.1:0"\nenrol', f'listen = "{there}"\nenrol')
    with ExitStack() as coordinator, pytest.raises(RefusedError) as error:
        coordinator.enter_context(running(folder))
        with training(home) as worker:
            while worker.outer_step < 2:
                worker.step()  # type: ignore[attr-defined]
            coordinator.close()
            change(folder, "every = 2", "every = 3")
            coordinator.enter_context(running(folder))
            for _ in range(10_000):
                worker.step()  # type: ignore[attr-defined]
    assert "not the one that this site consented to: sync.every = 3 (was 2); look at it with: edit-peer consent" in str(
        error.value
    )


def test_a_peer_ends_when_it_connects_again_after_the_last_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    today = [datetime.datetime(2026, 12, 31, 12, tzinfo=datetime.UTC)]
    load = SitePolicy.load
    monkeypatch.setattr(SitePolicy, "load", partial(load, now=lambda: today[0].timestamp()))
    folder = new_folder(tmp_path / "run", toml=TOML)
    with running(folder):
        home, there = joined(folder, tmp_path / "a"), address(folder)
    (home / "policy.toml").write_text("[limits]\nuntil = 2026-12-31\n")
    change(folder, 'listen = "127.0.0.1:0"\nenrol', f'listen = "{there}"\nenrol')
    with ExitStack() as coordinator, pytest.raises(RefusedError, match=r"limits\.until = 2026-12-31: that is over"):
        coordinator.enter_context(running(folder))
        with training(home) as worker:
            while worker.outer_step < 2:
                worker.step()  # type: ignore[attr-defined]
            coordinator.close()
            today[0] += datetime.timedelta(days=1)
            coordinator.enter_context(running(folder))
            while worker.outer_step < 6:
                worker.step()  # type: ignore[attr-defined]


def test_consent_does_not_wait_for_a_coordinator_that_does_not_answer_and_says_what_it_is_refused_with(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", toml=TOML)
    with running(folder):
        home, there = joined(folder, tmp_path / "a"), address(folder)
        run(["edit-coordinator", "evict", "a", "--state", str(folder.path), "--reason", "key lost"])
        with pytest.raises(EvictedError, match="key lost"):
            consent(home)
    with pytest.raises(TransportError, match=f"the coordinator at {there}: cannot be reached") as error:
        consent(home)
    assert error.value.exit_code == 69


def test_what_a_policy_asks_for_a_run_without_it_does_not_get(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", toml=TOML)
    with running(folder):
        home = joined(folder, tmp_path / "a")
        (home / "policy.toml").write_text("[require]\nsecagg = true\n")
        for attempt in (lambda: training(home).__enter__(), lambda: consent(home, "--accept", _digest(home))):
            with pytest.raises(ConfigError, match=r"require\.secagg = true: the run has secagg.enabled = false"):
                attempt()


def test_a_consent_stands_in_the_audit_log_and_who_lies_about_it_is_refused(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", toml=TOML + "[audit]\nenabled = true\n")
    with running(folder) as here:
        home = joined(folder, tmp_path / "a")
        digest = f"sha256:{'c' * 64}"
        data = f'statement = "notes"\nmanifest = "{digest}"\nlicence = "DUA-17"\n'
        (home / "policy.toml").write_text(f"[limits]\nuntil = 2999-01-01\n[data]\n{data}")
        assert "audit.enabled = true (default false)" in CliRunner().invoke(app, ["consent", "--home", str(home)]).stdout
        consent(home, "--accept", _digest(home))
        for _ in range(2):
            with training(home) as worker:
                while worker.outer_step < 1:
                    worker.step()  # type: ignore[attr-defined]
            assert here.run.consents == {"a": digest_of((home / "policy.toml").read_bytes()).removeprefix("sha256:")}
    log = LogVerifier()
    for line in (folder.path / "audit-log.jsonl").read_bytes().splitlines():
        log.take(line)
    assert {*log.consents} == {"a"} and log.consents["a"].policy_digest == here.run.consents["a"]
    assert log.consents["a"].data == DataStatement("notes", "c" * 64, "DUA-17")
    shown = run(["edit-coordinator", "audit", "usage", "--state", str(folder.path)])
    assert f"consented: a\na's data: notes; licence DUA-17; manifest {digest}" in shown
    listed = json.loads(run(["edit-coordinator", "audit", "usage", "--json", "--state", str(folder.path)]))
    assert listed["a"]["consented"] and listed["a"]["data"]["licence"] == "DUA-17"
    kinds = [json.loads(line)["kind"] for line in (folder.path / "audit-log.jsonl").read_bytes().splitlines()]
    assert kinds.count("consent") == 1


ASKS = SERVED_TOML + "[membership]\nconsent = true\n"


async def consents(peer: BarePeer, sign: ContributionSigner, config_json: str) -> None:
    digest = digest_of(config_json).removeprefix("sha256:")
    said = signed_consent(peer.run_id, peer.peer_id, digest, "", sign._signer)
    await peer._call.write(peer_message_to_pb(said))


def test_a_run_that_asks_for_consents_waits_for_them_and_counts_nobody_else(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", start=2, toml=ASKS)

    @on_a_loop
    async def scenario() -> None:
        async with served(folder) as run, run.signing_peer("a") as (a, of_a), run.signing_peer("b") as (b, of_b):
            at = run.coordinator.run
            await b.attend()
            assert at.founding.founder is None  # it may consent yet
            welcome = await a.attend()
            await consents(a, of_a, welcome.config_json)
            await a.view(lambda view: view.found)
            assert (await b.view()).found is False
            assert "2 peers (rounds.start_peers = 2)" in run_status(at).waiting_for
            assert run_status(at).waiting_for.endswith("; the consent of b")
            await a.found(theta())
            await a.report(0)
            with pytest.raises(grpc.aio.AioRpcError, match="b has not said yet that its site consents"):
                await b.contribute(1, 0, theta(1))
            await b.report(0)
            refused = await b.receive(Expel)
            assert isinstance(refused, Expel)
            assert not refused.evicted and "run `edit-peer consent`, then start the peer again" in refused.reason
            await until(lambda: at.attendances.get("b") is None)
            status = run_status(at)
            assert {row.peer_id: (row.state, row.consented) for row in status.members} == {
                "a": ("training", True),
                "b": ("lost", False),
            }
            assert "1 of 2 peers (rounds.start_peers = 2); the consent of b" in status.waiting_for
            b.received.clear()
            welcome = await b.attend()
            await consents(b, of_b, welcome.config_json)
            await b.report(0)
            await a.view(lambda view: view.round_id > 0)
            assert at.rounds.machine.expected == {"a", "b"} and at.consents_awaited() == []
            await b.disconnect()
            await until(lambda: at.attendances.get("b") is None)
            b.received.clear()
            await b.attend()
            await b.report(0)  # a consent is said on each connection: it may have been taken back
            await b.receive(Expel)
            assert at.consents_awaited() == ["b"]

    scenario()


def test_under_another_configuration_only_those_count_that_consent_to_it(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", toml=ASKS)

    @on_a_loop
    async def scenario() -> None:
        async with served(folder) as run, run.signing_peer("a") as (a, of_a):
            welcome = await a.attend()
            await consents(a, of_a, welcome.config_json)
            await a.view(lambda view: view.found)
            await a.found(theta())
            assert welcome.config_json == folder.config().to_json() and '"consent": true' in welcome.config_json
        before = welcome.config_json
        change(folder, "every = 2", "every = 3")
        async with served(folder) as run, run.signing_peer("a") as (a, of_a), run.signing_peer("b") as (b, of_b):
            await b.attend()
            await consents(b, of_b, before)
            assert "b consents to another configuration than it was told" in await b._call.details()
            welcome = await a.attend()
            await consents(a, of_a, welcome.config_json)
            await a.report(0)
            view = await a.view(lambda view: view.round_id > 0)
            await a.contribute(view.round_id, 0, theta(1))
            await a.view(lambda view: view.outer_step == 1)
            assert run.coordinator.run.consents_awaited() == ["b"]

    scenario()


def test_a_peer_whose_site_has_not_consented_ends_where_the_run_asks_for_it(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", toml=TOML + "[membership]\nconsent = true\n")
    with running(folder) as here:
        home = joined(folder, tmp_path / "a")
        why = f"nobody at this site has consented to the run's configuration sha256:.*edit-peer consent --home {home}"
        with pytest.raises(ConfigError, match=why):
            training(home).__enter__()
        consent(home, "--accept", _digest(home))
        with training(home) as worker:
            while worker.outer_step < 1:
                worker.step()  # type: ignore[attr-defined]
        assert here.run.consents == {"a": ""}


def test_a_site_bounds_its_contributions_and_keeps_numbers_to_itself(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", toml=TOML + '[codec]\nup = "fp32"\n')
    with running(folder) as here:
        home = joined(folder, tmp_path / "a")
        hidden = '["loss", "tokens_per_s", "step_s", "device", "metrics"]'
        (home / "policy.toml").write_text(f"[limits]\nmax_gb_per_day = 1.0\n[protect]\nclip = 0.125\nhide = {hidden}\n")
        with training(home) as worker:
            while worker.outer_step < 1:
                worker.count_tokens(10)
                worker.report(loss=1.5, held_out=2.0)
                worker.step()  # type: ignore[attr-defined]
            assert worker.last_commit is not None
            norms = [verdict.norm for each in worker.last_commit.fragments for verdict in each.verdicts]
            assert abs(math.hypot(*norms) - 0.125) < 1e-6
            here.await_(lambda run: (beat := run.attendances.membership.members["a"].heartbeat) and beat.inner_steps > 0)
            beat = here.run.attendances.membership.members["a"].heartbeat
        assert 0 < struct.unpack("<qq", (home / "sent-today").read_bytes())[1] <= 32 << 20
        assert beat is not None and math.isnan(beat.loss) and worker.speed.loss == 1.5 and worker.speed.step_s > 0
        assert (beat.tokens_per_s, beat.step_s, beat.device, dict(beat.metrics)) == (0.0, 0.0, "", {})


def test_a_swarm_asks_for_consents_and_one_that_gossips_does_not() -> None:
    assert RunConfig.from_mapping({"membership": {"consent": True}, "swarm": {}}).membership.consent
    with pytest.raises(ConfigError, match=r'membership\.consent = True: must be false with outer\.algorithm = "gossip"'):
        RunConfig.from_mapping({"membership": {"consent": True}, "outer": {"algorithm": "gossip"}, "swarm": {"parts": 1}})


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        ("configuration", "a consents to another configuration than it was told"),
        ("name", "the consent of a is not signed with the key that it names"),
        ("key", "a consent is signed with another key than the certificate's"),
    ],
)
def test_a_consent_that_is_none_is_refused(tmp_path: Path, lie: str, why: str) -> None:
    folder = new_folder(tmp_path / "run")

    @on_a_loop
    async def scenario() -> None:
        async with served(folder) as run, run.signing_peer("a") as (a, sign):
            welcome = await a.attend()
            digest = digest_of(welcome.config_json).removeprefix("sha256:") if lie != "configuration" else "0" * 64
            signer = Signer(member_key()) if lie == "key" else sign._signer
            said = signed_consent(folder.run_id, "b" if lie == "name" else "a", digest, "", signer)
            await a._call.write(peer_message_to_pb(said))
            assert why in await a._call.details() and not run.coordinator.run.consents

    scenario()


def _digest(home: Path) -> str:
    shown = CliRunner().invoke(app, ["consent", "--home", str(home)]).stdout
    return shown.splitlines()[2].removeprefix("configuration ")
