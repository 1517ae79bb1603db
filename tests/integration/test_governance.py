"""[governance] with a real coordinator: a changed run.toml counts once it is approved, and peers do not believe it before."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from typer.testing import CliRunner

from aggregator import server
from aggregator.cli import app as coordinator_app
from aggregator.control.status import run_status
from aggregator.resources import Clock
from aggregator.server import Coordinator, serve_changes
from aggregator.storage import store
from aggregator.storage.configurations import Configurations, configurations_of
from aggregator.storage.state_folder import StateFolder
from edit.errors import ConfigError, EditError, RefusedError, TransportError
from edit.trust.signatures import Signer
from editpb import governance_pb2_grpc
from editpb.approvals import signed_approval
from editpb.audit_log import LogVerifier
from editpb.governance_messages import approval_to_pb
from editpb.identity import Identity
from editpb.messages import Approval, ConfigChange, Configuration
from editpb.run_status import RunStatus
from editpb.status_messages import status_from_pb, status_to_pb
from peers.cli import app
from peers.connection import connect
from tests.integration.test_audit import commit_one
from tests.integration.test_readme import run
from tests.integration.test_site_policy import TOML, change, training
from tests.support.loops import on_a_loop, until
from tests.support.running import address, running
from tests.support.served import TOML as SERVED_TOML
from tests.support.served import Served, found_run, new_folder, served

SECTIONS = '[audit]\nenabled = true\n[governance]\napprovers = ["ann", "bob", "cyd"]\nneeded = 2\n'
GOVERNED = SERVED_TOML + SECTIONS


class Member:
    """An approver, or who claims to be one."""

    def __init__(self, at: Served, name: str, role: str = "observer") -> None:
        self.identity = Identity(at.folder.run_id, role, name)
        self.key, pem = at.certificate(name, role)
        self.certificate = x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER)
        self.credentials = grpc.ssl_channel_credentials(at.ca, self.key, pem)

    def signed(self, before: Configuration, digest: str) -> Approval:
        return signed_approval(self.identity, self.certificate, Signer(self.key), before, digest)

    async def send(self, at: Served, approval: Approval) -> str:
        async with grpc.aio.secure_channel(at.coordinator.listen, self.credentials) as channel:
            return (await governance_pb2_grpc.GovernanceStub(channel).Approve(approval_to_pb(approval))).standing

    async def approves(self, at: Served) -> str:
        waiting = configurations(at)
        assert waiting.proposed is not None
        return await self.send(at, self.signed(waiting.in_force, waiting.proposed.digest))


def configurations(at: Served) -> Configurations:
    found = at.coordinator.run._configurations
    assert found is not None
    return found


async def founded(folder: StateFolder) -> None:
    async with served(folder) as at, at.signing_peer("a") as a:
        await found_run(a[0])
        await commit_one([a], 0)


def verified(folder: StateFolder) -> LogVerifier:
    log = LogVerifier(authorities=x509.load_pem_x509_certificates((folder.path / "ca.pem").read_bytes()))
    for line in (folder.path / "audit-log.jsonl").read_bytes().splitlines():
        log.take(line)
    log.check_head((folder.path / "audit-log.head").read_bytes())
    return log


def test_a_changed_configuration_waits_for_its_approvals_over_kills_and_then_counts(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", toml=GOVERNED)

    @on_a_loop
    async def scenario() -> None:
        await founded(folder)
        before = folder.config()
        change(folder, "every = 2", "every = 3")
        digest = Configuration(2, folder.config().to_json()).digest
        async with served(folder, kill=True) as at, at.signing_peer("a") as a:
            assert at.coordinator.config == before  # the run goes on under what is in force
            wait = f"waiting for 2 more approvals of configuration sha256:{digest}: approvers ann, bob, cyd"
            assert run_status(at.coordinator.run).governance == wait
            welcome = await a[0].attend()
            assert (welcome.config_json, welcome.configuration, welcome.changes) == (before.to_json(), 1, ())
            await a[0].report(1)
            await commit_one([a], 1)
            standing = await Member(at, "ann", "peer").approves(at)
            assert (
                standing == f"waiting for 1 more approval of configuration sha256:{digest}: approvers bob, cyd; ann approved it"
            )
        async with served(folder, kill=True) as at:
            assert standing in run_status(at.coordinator.run).governance
            ann = Member(at, "ann")
            assert await ann.approves(at) == standing  # with another key now; still one approver
            assert not at.coordinator.run.approved.is_set()
            bob = Member(at, "bob", "operator")
            assert await bob.approves(at) == f"configuration sha256:{digest} has its approvals, of ann, bob"
            assert at.coordinator.run.approved.is_set() and at.coordinator.config == before
        async with served(folder) as at, at.signing_peer("a") as a:
            assert at.coordinator.config == folder.config() and run_status(at.coordinator.run).governance == ""
            welcome = await a[0].attend()
            assert (welcome.config_json, welcome.configuration) == (folder.config().to_json(), 2)
            assert at.coordinator.run.told(1)[1][0].to.digest == digest and at.coordinator.run.told(2)[1] == ()
            await a[0].report(2)
            await commit_one([a], 2)

    scenario()
    log = verified(folder)
    (change_,) = log.changes
    assert change_.approvers == ("ann", "bob") and log.commits == 3 and log.continued == []


@on_a_loop
async def test_the_status_waits_for_no_approver_who_was_evicted(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", toml=GOVERNED)
    await founded(folder)
    change(folder, "every = 2", "every = 3")
    wait = f"of configuration sha256:{Configuration(2, folder.config().to_json()).digest}: approvers"
    async with served(folder) as at:
        ann, _, _ = (Member(at, name) for name in ("ann", "bob", "cyd"))
        at.coordinator.run.evict("bob", "left")
        assert run_status(at.coordinator.run).governance == f"waiting for 2 more approvals {wait} ann, cyd"
        at.coordinator.run.evict("cyd", "left")
        few = "(too few are left: bob, cyd evicted)"
        assert run_status(at.coordinator.run).governance == f"waiting for 2 more approvals {wait} ann {few}"
        assert await ann.approves(at) == f"waiting for 1 more approval {wait} none {few}; ann approved it"


def test_serve_goes_on_under_the_configuration_that_was_approved(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", toml=GOVERNED)

    @on_a_loop
    async def scenario() -> None:
        await founded(folder)
        change(folder, "every = 2", "every = 3")
        asked, opened = asyncio.Event(), list[Served]()

        def open_it() -> Coordinator:
            opened.append(Served(Coordinator.open(folder), folder, None))  # type: ignore[arg-type]
            return opened[-1].coordinator

        serving = asyncio.create_task(serve_changes(open_it, asked))
        await until(lambda: opened and opened[0].coordinator._serving)
        for name in ("ann", "bob"):
            await Member(opened[0], name).approves(opened[0])
        await until(lambda: len(opened) == 2 and opened[1].coordinator._serving)
        assert [one.coordinator.config.sync.every for one in opened] == [2, 3]
        assert opened[0].coordinator.listen == opened[1].coordinator.listen
        asked.set()
        await serving

    scenario()
    assert len(verified(folder).changes) == 1


def test_a_finished_run_stays_served_while_a_change_waits_that_may_let_it_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = new_folder(tmp_path / "run", toml=GOVERNED.replace("outer_steps = 100", "outer_steps = 1"))
    monkeypatch.setattr(server, "_FAREWELL_S", 0.0)

    @on_a_loop
    async def scenario() -> None:
        await founded(folder)
        change(folder, "outer_steps = 1", "outer_steps = 2")
        for waits in (True, False):
            now = iter(range(0, 10**9, 1000))  # whoever is awaited had time enough
            async with served(folder, Clock(monotonic=lambda: float(next(now)))) as at:  # noqa: B023
                stop = asyncio.Event()
                ending = asyncio.create_task(at.coordinator.end_with_the_run(stop))
                assert at.coordinator.run.finished
                if waits:
                    for _ in range(200):
                        await asyncio.sleep(0)
                    assert not stop.is_set()
                else:
                    await stop.wait()
                ending.cancel()
            if waits:
                change(folder, "outer_steps = 2", "outer_steps = 1")

    scenario()


BAD: Sequence[tuple[str, Callable[[Member, Configurations], Approval], str]] = (
    ("eve", lambda who, of: who.signed(of.in_force, of.proposed.digest), "eve is no approver of this run (governance.appro"),
    ("ann", lambda who, of: who.signed(of.in_force, "0" * 64), "the configuration that waits for approvals is sha256:"),
    (
        "ann",
        lambda who, of: who.signed(replace(of.in_force, number=7), of.proposed.digest),
        "ann approves it as configuration 8",
    ),
    (
        "ann",
        lambda who, of: replace(who.signed(of.in_force, of.proposed.digest), signature=b"\1" * 64),
        "the approval of ann is not signed with the key of its certificate",
    ),
    (
        "ann",
        lambda who, of: signed_approval(
            Identity("run2", "observer", "ann"), who.certificate, Signer(who.key), of.in_force, of.proposed.digest
        ),
        "the approval of ann is not signed with the key of its certificate",
    ),
)


def test_an_approval_that_does_not_count_is_refused_by_name_and_not_logged(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", toml=GOVERNED)

    @on_a_loop
    async def scenario() -> None:
        await founded(folder)
        change(folder, "every = 2", "every = 3")
        before = (folder.path / "audit-log.jsonl").read_bytes()
        async with served(folder) as at:
            waiting = configurations(at)
            for name, lie, why in BAD:
                who = Member(at, name)
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await who.send(at, lie(who, waiting))
                assert why in refused.value.details()
            ann, bob = Member(at, "ann"), Member(at, "bob")
            with pytest.raises(grpc.aio.AioRpcError, match="signed with another key than the certificate's"):
                await bob.send(at, ann.signed(waiting.in_force, waiting.proposed.digest))
            assert not waiting.approvals and (folder.path / "audit-log.jsonl").read_bytes() == before
            at.disk.full = True
            with pytest.raises(grpc.aio.AioRpcError, match="cannot be written"):
                await ann.approves(at)
            assert not waiting.approvals
            at.disk.full = False
            await ann.approves(at)
            for _ in range(2):
                await bob.approves(at)

    scenario()
    kinds = [json.loads(line)["kind"] for line in (folder.path / "audit-log.jsonl").read_bytes().splitlines()]
    assert kinds == ["genesis", "commit", "approval", "approval"] and verified(folder).changes == []


def test_without_a_change_nobody_is_asked_and_the_operator_may_take_a_change_back(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", toml=GOVERNED)

    @on_a_loop
    async def scenario() -> None:
        change(folder, "every = 2", "every = 4")  # before the run is founded nothing is in force
        async with served(folder) as at:
            with pytest.raises(grpc.aio.AioRpcError, match="no configuration waits for approvals"):
                ann = Member(at, "ann")
                await ann.send(at, ann.signed(configurations(at).in_force, "0" * 64))
        await founded(folder)
        change(folder, "every = 4", "every = 9")
        async with served(folder) as at:
            assert run_status(at.coordinator.run).governance
            await Member(at, "ann").approves(at)
        change(folder, "every = 9", "every = 4")
        async with served(folder) as at:
            assert not run_status(at.coordinator.run).governance
        change(folder, 'listen = "127.0.0.1:0"\nenrol', 'listen = "localhost:0"\nenrol')  # of no concern to others
        async with served(folder) as at:
            assert not run_status(at.coordinator.run).governance and at.coordinator.config.server.listen == "localhost:0"

    scenario()
    change(folder, SECTIONS, "")
    with pytest.raises(ConfigError, match=r"run\.toml: audit\.enabled = False: .* first remove governance\.approvers"):
        configurations_of(folder)


def joined(folder: StateFolder, home: Path, role: str = "peer") -> Path:
    invitation = run(["edit-coordinator", "invite", home.name, "--role", role, "--state", str(folder.path)])
    run(["edit-peer", "join", invitation.splitlines()[0], "--home", str(home)])
    return home


def approve(home: Path, *words: str) -> str:
    result = CliRunner().invoke(app, ["approve", *words, "--home", str(home)])
    if isinstance(result.exception, EditError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def trained(home: Path, until_step: int) -> None:
    with training(home) as worker:
        while worker.outer_step < until_step:
            worker.step()  # type: ignore[attr-defined]


def test_the_commands_show_a_change_and_approve_it_and_a_peer_follows(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", toml=TOML + SECTIONS)
    with running(folder):
        a, ann, bob, eve = (joined(folder, tmp_path / name, role) for name, role in ROLES)
        assert "no changed configuration waits for approvals" in approve(ann)
        assert not (ann / "configuration.json").exists()
        trained(a, 1)
        there = address(folder)
    assert json.loads((a / "configuration.json").read_text())["number"] == 1
    change(folder, 'listen = "127.0.0.1:0"\nenrol', f'listen = "{there}"\nenrol')
    change(folder, "every = 2", "every = 3")
    change(folder, "grace_s = 0.2", "grace_s = 0.3")
    with running(folder) as here:
        with pytest.raises(
            ConfigError, match=r"nobody can be asked; approve with: edit-peer approve sha256:.* --home "
        ) as caught:
            approve(ann)
        digest = str(caught.value).split()[-3]
        shown = CliRunner().invoke(app, ["approve", "--home", str(ann)]).stdout
        assert "in force: configuration 1, sha256:" in shown and "a change needs 2 of them" in shown
        assert f"waits for 2 more: configuration 2, {digest}\napproved by nobody yet\n" in shown
        assert "what changes:\n  rounds.grace_s = 0.3 (was 0.2)\n  sync.every = 3 (was 2)\n" in shown
        with pytest.raises(ConfigError, match=f"sha256:{'0' * 64}: the configuration that waits is {digest}"):
            approve(ann, f"sha256:{'0' * 64}")
        with pytest.raises(RefusedError, match="eve is no approver of this run"):
            approve(eve, digest)
        assert f"waiting for 1 more approval of configuration {digest}: approvers bob, cyd; ann approved it" in approve(
            ann, digest
        )
        assert "approved by ann" in approve(bob, digest)
        here.await_(lambda run: run.approved.is_set())
    with running(folder) as here:
        assert here.run.config.sync.every == 3
        trained(a, 3)
    assert json.loads((a / "configuration.json").read_text())["number"] == 2
    copy = tmp_path / "copy"
    for words in (["verify", "--state", str(folder.path)], ["export", str(copy), "--state", str(folder.path)]):
        assert CliRunner().invoke(coordinator_app, ["audit", *words]).exit_code == 0
    said = CliRunner().invoke(coordinator_app, ["audit", "verify", "--state", str(copy)]).stdout
    assert f"to configuration 2, {digest}, in entry" in said and "approved by ann, bob" in said


ROLES = (("a", "peer"), ("ann", "observer"), ("bob", "peer"), ("eve", "observer"))


def tells(folder: StateFolder, changes: Callable[[Configuration, Configuration], list[ConfigChange]]) -> Configurations:
    """What a coordinator serves that takes a changed run.toml for approved."""
    honest = configurations_of(folder)
    assert honest.proposed is not None
    said = changes(honest.in_force, honest.proposed)
    return Configurations(folder.config(), honest.rules, said[-1].to if said else honest.proposed, said)


LIES: Sequence[tuple[Callable[[Configuration, Configuration], list[ConfigChange]], str]] = (
    (lambda before, after: [], "its approvals are missing"),
    (lambda before, after: [ConfigChange(after)], r"has 0 of the 2 approvals that configuration 1 asks for \(governance\."),
    (lambda before, after: [ConfigChange(replace(after, number=1))], "nothing is said of a change, which needs approvals"),
)


@pytest.mark.parametrize(("lie", "why"), LIES)
def test_a_peer_does_not_believe_a_coordinator_that_was_not_given_approvals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: Callable[[Configuration, Configuration], list[ConfigChange]], why: str
) -> None:
    folder = new_folder(tmp_path / "run", toml=TOML + SECTIONS)
    with running(folder):
        a, fresh = joined(folder, tmp_path / "a"), joined(folder, tmp_path / "b")
        there = address(folder)
    change(folder, 'listen = "127.0.0.1:0"\nenrol', f'listen = "{there}"\nenrol')
    with ExitStack() as coordinator:
        coordinator.enter_context(running(folder))
        trained(a, 1)
        with pytest.raises(RefusedError, match=why) as while_it_trains, training(a) as worker:
            while worker.outer_step < 2:
                worker.step()  # type: ignore[attr-defined]
            coordinator.close()
            change(folder, "every = 2", "every = 3")
            told = tells(folder, lie)
            for where in (server, store):
                monkeypatch.setattr(where, "configurations_of", lambda _: told)
            coordinator.enter_context(running(folder))
            for _ in range(100_000):
                worker.step()  # type: ignore[attr-defined]
        with pytest.raises(RefusedError, match=why) as at_the_start, training(a):
            pass
        assert while_it_trains.value.exit_code == at_the_start.value.exit_code == 3
        assert "\n" not in str(at_the_start.value)
        assert json.loads((a / "configuration.json").read_text())["number"] == 1
        with connect(fresh) as (_, config):  # who has seen nothing before believes the first that it is told
            assert config.sync.every == 3


@pytest.mark.parametrize("sections", [SECTIONS, SECTIONS.partition("[governance]")[0]], ids=["governed", "audited"])
def test_a_peer_that_trains_ends_when_a_change_counts_and_follows_when_it_is_started_again(
    tmp_path: Path, sections: str
) -> None:
    folder = new_folder(tmp_path / "run", toml=TOML + sections)
    with running(folder):
        a, there = joined(folder, tmp_path / "a"), address(folder)
    change(folder, 'listen = "127.0.0.1:0"\nenrol', f'listen = "{there}"\nenrol')
    with ExitStack() as coordinator:
        coordinator.enter_context(running(folder))
        with (
            pytest.raises(RefusedError, match=r"another configuration now, sha256:.*; start this peer again"),
            training(a) as peer,
        ):
            while peer.outer_step < 1:
                peer.step()  # type: ignore[attr-defined]
            coordinator.close()
            change(folder, "every = 2", "every = 3")
            with running(folder) as here:
                for name in ("cyd", "ann") if sections == SECTIONS else ():
                    asyncio.run(Member(here.served, name).approves(here.served))
            coordinator.enter_context(running(folder))
            for _ in range(100_000):
                peer.step()  # type: ignore[attr-defined]
        trained(a, 3)


def test_a_peer_that_trains_notes_a_change_that_was_taken_back_while_it_was_not_connected(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", toml=TOML + SECTIONS)
    with running(folder):
        a, there = joined(folder, tmp_path / "a"), address(folder)
    listen = f'listen = "{there}"\nenrol'
    change(folder, 'listen = "127.0.0.1:0"\nenrol', listen)
    with ExitStack() as coordinator:
        coordinator.enter_context(running(folder))
        with training(a) as peer:
            while peer.outer_step < 1:
                peer.step()  # type: ignore[attr-defined]
            coordinator.close()
            change(folder, listen, 'listen = "127.0.0.1:0"\nenrol')
            folder.addresses.unlink()  # where the peer does not look for it
            for before, after in (("every = 2", "every = 3"), ("every = 3", "every = 2")):
                change(folder, before, after)
                with running(folder) as here:
                    for name in ("cyd", "ann"):
                        asyncio.run(Member(here.served, name).approves(here.served))
                with running(folder):
                    pass
            change(folder, 'listen = "127.0.0.1:0"\nenrol', listen)
            coordinator.enter_context(running(folder))
            while peer.outer_step < 3:
                peer.step()  # type: ignore[attr-defined]
    assert json.loads((a / "configuration.json").read_text())["number"] == 3


def test_a_status_says_what_is_waited_for_on_the_wire_and_as_json(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", toml=GOVERNED)

    @on_a_loop
    async def scenario() -> None:
        await founded(folder)
        change(folder, "every = 2", "every = 3")
        async with served(folder) as at:
            status = run_status(at.coordinator.run)
            assert status.governance.startswith("waiting for 2 more approvals of configuration sha256:")
            assert status_from_pb(status_to_pb(status)).governance == status.governance
            assert RunStatus.from_json(status.as_json()).governance == status.governance
            assert "governance" not in replace(status, governance="").as_json()

    scenario()


def test_a_command_without_a_coordinator_says_so(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", toml=TOML + SECTIONS)
    with running(folder):
        home = joined(folder, tmp_path / "ann", "observer")
    with pytest.raises(TransportError, match=r"the coordinator at 127\.0\.0\.1:"):
        approve(home)
