"""Under which configuration a run is served: a changed run.toml counts once the log has its approvals, over kills, too."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from aggregator.cli import app
from aggregator.operator_client import further_addresses
from aggregator.past import last_status
from aggregator.security.authority import Authority
from aggregator.security.certificates import Issuer
from aggregator.server import Coordinator
from aggregator.storage.audit_log import AuditLog
from aggregator.storage.configurations import Configurations, configurations_of
from aggregator.storage.journal import Disk
from aggregator.storage.state_folder import StateFolder
from aggregator.storage.store import Store, load_outer
from edit.config.run import RunConfig
from edit.durable_files import write_json
from edit.errors import ConfigError, StaleError, StorageError
from edit.fragments.gpt import gpt_schema
from edit.fragments.schema import Schema
from edit.merging.outer_state import OuterState
from editpb.audit_log import LogVerifier
from editpb.messages import Configuration
from tests.aggregator.storage.test_audit_log import Killed, MortalDisk
from tests.support.approvers import Approver
from tests.support.served import SCHEMA, new_folder, theta
from tests.support.served import TOML as SERVED_TOML

TOML = SERVED_TOML + '[audit]\nenabled = true\n[governance]\napprovers = ["ann", "bob", "cyd"]\nneeded = 2\n'


def opened(folder: StateFolder, disk: Disk | None = None, schema: Schema = SCHEMA) -> AuditLog:
    """Start as the coordinator does; the log that it goes on with."""
    config = configurations_of(folder).config
    audit = AuditLog.open(folder.path, folder.run_id, config, lambda: 1.7e9, disk)
    store = Store(folder.outer, config, folder.run_id, disk, audit=audit)
    if store.recover() is None:
        store.found(OuterState(schema, config, theta(schema=schema)))
    return audit


async def start(folder: StateFolder, *settings: str) -> None:
    """Start with settings of `serve --set`, and stop."""
    folder.change(settings)
    coordinator = Coordinator.open(folder)
    try:
        await coordinator.start()
    finally:
        await coordinator.close()


@pytest.mark.parametrize(
    ("setting", "difference"), [("model.width=8", "[256, 4] in the run and [256, 8]"), ("model.layers=1", "")]
)
def test_a_model_that_is_not_the_parameters_is_refused_before_anything_is_written(
    tmp_path: Path, setting: str, difference: str
) -> None:
    toml = SERVED_TOML.replace('name = "entry:mine"', 'name = "builtin:gpt"\nlayers = 2\nheads = 2\nwidth = 4')
    folder = new_folder(tmp_path / "run", toml=toml + "[audit]\nenabled = true\n")
    schema = gpt_schema(layers=2, width=4, vocabulary=256)
    folder.first_round_id(0.0)
    opened(folder, schema=schema).close()
    before = folder.run_toml.read_bytes(), (folder.path / "audit-log.jsonl").read_bytes()
    with pytest.raises(ConfigError) as refused:
        asyncio.run(start(folder, setting))
    said = str(refused.value)
    assert setting.replace("=", " = ") in said and "the run's parameters were made with another [model]" in said
    assert difference in said and "\n" not in said
    assert before == (folder.run_toml.read_bytes(), (folder.path / "audit-log.jsonl").read_bytes())


NOISY = ('privacy.level="organisation"', "privacy.clip=1.0", "privacy.delta=1e-5", "privacy.epsilon_max=8.0")
NOISE = (*NOISY, "privacy.noise_multiplier=1.0", "penalty.enabled=false", "rounds.max_staleness=0")


@pytest.mark.parametrize("founded", [False, True])
def test_a_level_of_privacy_that_is_refused_leaves_no_ledger_and_one_without_attempts_can_be_taken_back(
    tmp_path: Path, founded: bool
) -> None:
    toml = SERVED_TOML.replace('name = "entry:mine"', 'name = "builtin:gpt"\nlayers = 2\nheads = 2\nwidth = 4')
    folder = new_folder(tmp_path / "run", toml=toml + "[audit]\nenabled = true\n")
    if founded:
        folder.first_round_id(0.0)
        opened(folder, schema=gpt_schema(layers=2, width=4, vocabulary=256)).close()
    before = folder.run_toml.read_bytes()
    with pytest.raises(ConfigError, match="the noise of an outer step is"):
        asyncio.run(start(folder, *NOISE))
    assert folder.run_toml.read_bytes() == before and not folder.privacy_ledger.exists()
    folder = StateFolder(folder.path)
    asyncio.run(start(folder, *NOISE, "privacy.accept_noise=true"))
    assert folder.privacy_ledger.exists()
    folder.run_toml.write_bytes(before)
    asyncio.run(start(folder))


@pytest.mark.parametrize("founded", [False, True])
def test_where_the_port_is_in_use_run_toml_has_the_setting_as_the_log_has(tmp_path: Path, founded: bool) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        toml = SERVED_TOML.replace('\nlisten = "127.0.0.1:0"', f'\nlisten = "127.0.0.1:{port}"')
        folder = new_folder(tmp_path / "run", toml=toml + '[audit]\nenabled = true\n[average]\nkind = "ema"\n')
        if founded:
            folder.first_round_id(0.0)
            opened(folder).close()
        with pytest.raises(ConfigError, match="is the port in use"):
            asyncio.run(start(folder, "sync.every=7", "average.kind=none"))
    again = StateFolder(folder.path)
    assert (again.config().sync.every, again.config().average.kind) == (7, "none")
    assert configurations_of(again).in_force.text == again.config().to_json()
    if founded:
        assert configurations_of(again).in_force.number == 2 and "averaged" not in load_outer(again).metadata()


def test_settings_that_were_refused_below_the_high_water_mark_are_not_kept(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", toml=SERVED_TOML + "[audit]\nenabled = true\n")
    folder.first_round_id(0.0)
    opened(folder).close()
    write_json(folder.high_water, {"outer_step": 3, "digest": "0" * 64}, version=1)
    before = folder.run_toml.read_bytes(), (folder.path / "audit-log.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="holds outer step 0, but outer step 3 was committed"):
        asyncio.run(start(folder, "sync.every=7"))
    assert before == (folder.run_toml.read_bytes(), (folder.path / "audit-log.jsonl").read_bytes())


def approver(folder: StateFolder, name: str) -> Approver:
    issuer: Issuer = Authority.load(folder.path, folder.run_id).issuer
    return Approver.of(issuer, name, run_id=folder.run_id)


def rewrite(folder: StateFolder, every: int) -> None:
    text = "".join(f"every = {every}\n" if line.startswith("every") else f"{line}\n" for line in TOML.splitlines())
    folder.run_toml.write_text(text.format(start=1, quorum=1))


def waiting(folder: StateFolder) -> tuple[Configurations, Configuration]:
    found = configurations_of(folder)
    assert found.proposed is not None
    return found, found.proposed


def verified(folder: StateFolder) -> LogVerifier:
    log = LogVerifier()
    for line in (folder.path / "audit-log.jsonl").read_bytes().splitlines():
        log.take(line)
    return log


@pytest.mark.covering
@pytest.mark.parametrize("how", ["before", "middle", "after"])
@pytest.mark.parametrize("calls", range(4))
def test_an_approval_that_was_acknowledged_is_there_after_a_kill(tmp_path: Path, calls: int, how: str) -> None:
    folder = new_folder(tmp_path / "run", toml=TOML)
    opened(folder).close()
    rewrite(folder, 7)
    (_, proposed), ann, bob = waiting(folder), approver(folder, "ann"), approver(folder, "bob")
    dying, acknowledged = opened(folder, mortal(calls, how)), list[str]()
    try:
        for name, who in (("ann", ann), ("bob", bob)):
            dying.approve(name, who.approves(configurations_of(folder).in_force, proposed))
            acknowledged.append(name)
    except Killed:
        pass
    dying.close()
    opened(folder).close()
    found = configurations_of(folder)
    if found.proposed is None:  # both are there, whoever was told so
        assert found.config.sync.every == 7 and verified(folder).changes[0].approvers == ("ann", "bob")
    else:
        assert set(acknowledged) <= found.approvals.keys() and found.config.sync.every == 2
        assert len(acknowledged) < 2 and verified(folder).changes == []
    again = opened(folder)
    for name, who in (("ann", ann), ("bob", bob)):  # who was told nothing says it again
        if found.proposed is not None:
            again.approve(name, who.approves(found.in_force, proposed))
    again.close()
    opened(folder).close()
    (change,) = verified(folder).changes
    assert change.approvers == ("ann", "bob") and configurations_of(folder).in_force.number == 2


def mortal(calls: int, how: str) -> Disk:
    disk = MortalDisk(calls, how)
    started = [False]

    def write(descriptor: int, data: memoryview) -> int:
        started[0] = True  # a start without news only brings what is there to the disk
        return disk.write(descriptor, data)

    return Disk(write=write, fsync=lambda descriptor: disk.fsync(descriptor) if started[0] else None)


def test_approvals_of_a_change_that_was_given_up_count_when_it_comes_back_and_never_for_another(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", toml=TOML)
    log = opened(folder)
    rewrite(folder, 7)
    first, seven = waiting(folder)
    ann, bob, cyd = (approver(folder, name) for name in ("ann", "bob", "cyd"))
    log.approve("ann", ann.approves(first.in_force, seven))
    rewrite(folder, 9)
    found, nine = waiting(folder)
    assert not found.approvals and found.missing == 2
    with pytest.raises(StaleError, match=f"the configuration that waits for approvals is sha256:{nine.digest}"):
        found.check(bob.approves(first.in_force, seven))
    rewrite(folder, 7)
    found, _ = waiting(folder)
    assert set(found.approvals) == {"ann"} and found.text(lambda name: False).endswith("approvers bob, cyd; ann approved it")
    log.approve("cyd", cyd.approves(first.in_force, seven))
    log.close()
    opened(folder).close()
    rewrite(folder, 2)  # back to what was in force before: another change
    found, two = waiting(folder)
    assert (found.in_force, two.number) == (seven, 3) and not found.approvals
    assert [each.to.number for each in found.since(1)] == [2] and found.since(2) == () == found.since(0)
    log = opened(folder)
    for name, who in (("bob", bob), ("ann", ann)):
        log.approve(name, who.approves(found.in_force, two))
    log.close()
    opened(folder).close()
    rewrite(folder, 7)  # approved once, as configuration 2, and not as configuration 4
    found, _ = waiting(folder)
    assert not found.approvals and found.config.sync.every == 2 and found.in_force.number == 3
    assert [change.number for change in verified(folder).changes] == [2, 3]


def test_what_the_software_writes_otherwise_is_no_change(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", toml=TOML)
    opened(folder).close()
    path = folder.path / "audit-log.jsonl"
    before = path.read_bytes()
    path.write_bytes(before.replace(b'\\"every\\": 2', b'\\"every\\":  2'))  # as another version might write it
    assert path.read_bytes() != before
    found = configurations_of(folder)
    assert found.proposed is None and found.config == folder.config() and found.in_force.number == 2


def test_a_damaged_log_is_named(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", toml=TOML)
    opened(folder).close()
    path = folder.path / "audit-log.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"kind":"genesis"', b'"kind":"genesis",'))
    with pytest.raises(StorageError, match=r"audit-log\.jsonl: entry 0 is damaged"):
        configurations_of(folder)


def test_a_run_without_a_log_is_served_as_run_toml_says(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run")
    found = configurations_of(folder)
    assert (found.config, found.in_force.number, found.text(lambda name: False), found.missing) == (folder.config(), 1, "", 0)
    assert isinstance(found.config, RunConfig)


def test_commands_go_by_the_configuration_in_force(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", toml=TOML)
    folder.first_round_id(0.0)
    opened(folder).close()
    governance = TOML[TOML.index("[governance]") :]
    unapproved = TOML.replace(governance, '[aggregators]\naddresses = ["127.0.0.1:1"]\n').replace(
        "outer_steps = 100", "outer_steps = 7"
    )
    folder.run_toml.write_text(unapproved.format(start=1, quorum=1))
    assert (folder.config().aggregators.count, folder.config().sync.outer_steps) == (2, 7)
    assert further_addresses(folder) == ()
    assert last_status(folder).outer_steps == 100
    folder.run_toml.write_text(TOML.format(start=1, quorum=1) + '[robust]\ntrust = "loss"\n')
    assert folder.config().robust.scored
    folder.run_toml.write_text(
        folder.run_toml.read_text().replace('enrol_listen = "127.0.0.1:0"', 'enrol_listen = "127.0.0.1:1"')
    )
    invited = CliRunner().invoke(app, ["invite", "--state", str(folder.path), "judge", "--role", "scorer"])
    assert 'robust.trust is not "loss": a scorer has nothing to do' in invited.stderr
