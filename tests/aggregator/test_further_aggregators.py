"""The folder of a further aggregator, who is a member there, and the parts of a run put together again."""

from __future__ import annotations

import dataclasses
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID
from safetensors import safe_open
from safetensors.torch import load_file
from typer.testing import CliRunner

from aggregator.cli import app
from aggregator.export import export_parameters
from aggregator.security.authority import Authority, check_equipped
from aggregator.security.certificates import key_pem, new_key
from aggregator.security.members import Members
from aggregator.storage.state_folder import StateFolder
from aggregator.storage.store import Store
from edit.config.run import RunConfig
from edit.errors import ConfigError, RefusedError
from edit.fragments.assignment import assign
from edit.fragments.digest import digest
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from edit.merging.outer_state import OuterState
from edit.replica.ranks import ALONE
from editpb.identity import Identity, from_certificate
from peers.carriers.hub.all_aggregators import agreed_configuration, connect_hub
from peers.carriers.hub.channels import Channels
from peers.carriers.io_thread import IoThread
from tests.support.fake_coordinator import RUN_ID, FakeCoordinator
from tests.support.served import SCHEMA, theta

TOML = 'name = "spread"\n[aggregators]\naddresses = ["127.0.0.1:7711", "host-c:7722"]\n[server]\nlisten = "127.0.0.1:0"\n'
NOW = 1_800_000_000.0


@pytest.fixture
def coordinator(tmp_path: Path) -> StateFolder:
    folder = StateFolder.create(tmp_path / "s0", TOML)
    Authority.create(folder.path, folder.run_id, folder.config().server.advertise, now=time.time())
    return folder


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def further(coordinator: StateFolder, number: int) -> StateFolder:
    path = coordinator.path.parent / f"s{number}"
    run("new-aggregator", number, path, "--state", coordinator.path)
    return StateFolder(path)


def test_the_folder_can_serve_its_address_and_enrol_nobody(coordinator: StateFolder) -> None:
    folder = further(coordinator, 2)
    assert (folder.run_id, folder.aggregator) == (coordinator.run_id, 2)
    assert {path.name for path in folder.path.iterdir()} == {"run.json", "run.toml", "ca.pem", "server.key", "server.pem"}
    assert (folder.path / "server.key").stat().st_mode & 0o777 == 0o600
    certificate = x509.load_pem_x509_certificate((folder.path / "server.pem").read_bytes())
    purposes = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert list(purposes) == [ExtendedKeyUsageOID.SERVER_AUTH] and names.get_values_for_type(x509.DNSName) == ["host-c"]
    assert from_certificate(certificate) == Identity(coordinator.run_id, "coordinator", "aggregator-2")
    server = folder.config().server
    assert (server.listen, server.advertise) == ("0.0.0.0:7722", ("host-c",))
    assert further(coordinator, 1).config().server.listen == "127.0.0.1:7711"  # a loopback address stays one
    assert folder.config().to_json() == coordinator.config().to_json()


def test_made_again_it_takes_over_the_present_settings(coordinator: StateFolder) -> None:
    folder = further(coordinator, 1)
    coordinator.run_toml.write_text(TOML.replace("127.0.0.1:7711", "host-b:7711"))
    with pytest.raises(ConfigError, match=r"does not name aggregator 1 at host-b, does not fit server\.key, has expired"):
        check_equipped(folder.path, folder.run_id, 1, "host-b", now=time.time())
    assert further(coordinator, 1).config().server.advertise == ("host-b",)
    check_equipped(folder.path, folder.run_id, 1, "host-b", now=time.time())
    with pytest.raises(ConfigError, match="expired"):
        check_equipped(folder.path, folder.run_id, 1, "host-b", now=time.time() + 11 * 365 * 86400)
    check_equipped(
        folder.path, folder.run_id, 1, "host-b", now=time.time() - 10 * 86400
    )  # all are ahead of a clock that is behind
    ahead = time.time() + 100 * 86400
    Authority.load(coordinator.path, coordinator.run_id).equip(folder.path, 1, "host-b", now=ahead)
    with pytest.raises(ConfigError, match="not valid yet by this machine's clock"):
        check_equipped(folder.path, folder.run_id, 1, "host-b", now=time.time())
    (folder.path / "server.key").unlink()
    with pytest.raises(ConfigError, match=r"server\.key: is missing; make it with `edit-coordinator new-aggregator`"):
        check_equipped(folder.path, folder.run_id, 1, "host-b", now=time.time())


def test_what_is_no_further_aggregator_is_refused(coordinator: StateFolder, tmp_path: Path) -> None:
    for number in (0, 3):
        with pytest.raises(ConfigError, match=f"aggregators.addresses has 2 entries; there is no aggregator {number}"):
            further(coordinator, number)
    with pytest.raises(ConfigError, match="is of aggregator 0 of run"):
        run("new-aggregator", 1, coordinator.path, "--state", coordinator.path)
    with pytest.raises(ConfigError, match=r"operator\.key"):
        CliRunner().invoke(app, ["pause", "--state", str(served(further(coordinator, 1)).path)], catch_exceptions=False)


def served(folder: StateFolder) -> StateFolder:
    folder.addresses.write_text('{"listen": "127.0.0.1:1", "enrol_listen": ""}')
    return folder


class TestMembers:
    """Where nobody is enrolled."""

    def certificate(self, coordinator: StateFolder, identity: Identity, issued: float) -> x509.Certificate:
        authority = Authority.load(coordinator.path, coordinator.run_id)
        return authority.issuer.issue(identity, new_key().public_key(), lifetime_s=1e6, now=issued)

    def test_a_certificate_of_the_authority_is_enough_until_a_later_one_is_seen(
        self, coordinator: StateFolder, tmp_path: Path
    ) -> None:
        alice = Identity(coordinator.run_id, "peer", "alice")
        members = Members(tmp_path / "members.json", new=True, enrols=False)
        old, new = (self.certificate(coordinator, alice, time.time() + age) for age in (0, 60))

        def allowed(certificate: x509.Certificate) -> str | None:
            members.add_caller(alice, certificate)
            return members.why_refused(alice, certificate)

        assert allowed(old) is None and allowed(old) is None
        assert allowed(new) is None
        assert "replaced by a newer one" in (allowed(old) or "") and allowed(new) is None
        members = Members(tmp_path / "members.json", new=True, enrols=False)
        assert "replaced by a newer one" in (allowed(old) or "")

    def test_an_eviction_holds_also_of_somebody_who_was_never_here(self, coordinator: StateFolder, tmp_path: Path) -> None:
        members = Members(tmp_path / "members.json", new=True, enrols=False)
        members.evict("bob", "key lost")
        members.evict("bob", "key lost")  # as often as one likes
        bob = Identity(coordinator.run_id, "peer", "bob")
        certificate = self.certificate(coordinator, bob, time.time() + 60)
        members.add_caller(bob, certificate)
        assert members.why_refused(bob, certificate) == "key lost" and members.evicted("bob")

    def test_where_members_are_enrolled_a_stranger_is_none(self, coordinator: StateFolder) -> None:
        members = Authority.load(coordinator.path, coordinator.run_id).members
        eve = Identity(coordinator.run_id, "peer", "eve")
        members.add_caller(eve, self.certificate(coordinator, eve, time.time()))
        assert members.why_refused(eve) == "eve is not a member of this run"


def test_a_peer_cannot_pose_as_an_aggregator(coordinator: StateFolder) -> None:
    """Its certificate is of the right authority and may serve, but under no host's name."""
    authority, key = Authority.load(coordinator.path, coordinator.run_id), new_key()
    mallory = Identity(coordinator.run_id, "peer", "mallory")
    certificate = authority.issuer.issue(mallory, key.public_key(), lifetime_s=1e6, now=time.time())
    pem, ca = certificate.public_bytes(serialization.Encoding.PEM), (coordinator.path / "ca.pem").read_bytes()
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_secure_port(
        "127.0.0.1:0", grpc.ssl_server_credentials([(key_pem(key), pem)], ca, require_client_auth=True)
    )
    server.start()
    try:
        channels = Channels((f"127.0.0.1:{port}",), grpc.ssl_channel_credentials(ca, key_pem(key), pem))
        with IoThread() as io, pytest.raises(RefusedError, match="does not name the address connected to"):
            agreed_configuration(io, channels, mallory, ALONE)
    finally:
        server.stop(None)


def test_a_peer_enters_only_when_all_aggregators_have_the_coordinators_settings() -> None:
    def faked(config: RunConfig) -> FakeCoordinator:
        return FakeCoordinator(config, SCHEMA, theta())

    me = Identity(RUN_ID, "peer", "a")
    values = {"sync": {"every": 8}, "name": "test"}
    with IoThread() as io, faked(RunConfig.from_mapping(values)) as second:
        address = f"127.0.0.1:{second.port}"
        config = RunConfig.from_mapping({**values, "aggregators": {"addresses": [address]}})
        second.config = config
        with faked(config) as first:
            channels = Channels((f"127.0.0.1:{first.port}",))
            assert agreed_configuration(io, channels, me, ALONE) == (
                dataclasses.replace(config, server=RunConfig().server),
                [0, 0],
            )
            second.show(outer_step=3)
            with connect_hub(io, channels, me, ALONE) as (connection, _, run_step):
                assert (connection.reached, run_step) == (3, 0)
            second.config = dataclasses.replace(config, sync=dataclasses.replace(config.sync, every=16))
            with pytest.raises(
                ConfigError, match=rf"aggregator 1 \({address}\) has other .*: sync.every is 16, not 8; give it"
            ):
                agreed_configuration(io, channels, me, ALONE)
            second.config = dataclasses.replace(config, seed=5)
            with pytest.raises(ConfigError, match="seed is 5, not 0; give it"):
                agreed_configuration(io, channels, me, ALONE)
            muon = dataclasses.replace(config, inner=dataclasses.replace(config.inner, optimizer="muon"))
            assert "optimizer" not in json.loads(config.to_json())["inner"], "it is told only where it is another one"
            for told, said in ((muon, "'muon', not 'adamw'"), (config, "'adamw', not 'muon'")):
                first.config, second.config = (muon if told is config else config), told
                with pytest.raises(ConfigError, match=f"inner.optimizer is {said}; give it"):
                    agreed_configuration(io, channels, me, ALONE)


class TestExport:
    """ShardedFragment of a model of five layers, founded at three aggregators."""

    schema = Schema(
        tuple(
            FragmentSpec(fragment_id=i, name=f"l{i}", tensors=(TensorSpec(name=f"l{i}.weight", shape=(i + 1, 2)),))
            for i in range(5)
        )
    )

    def parts(self, coordinator: StateFolder) -> tuple[list[StateFolder], list[torch.Tensor]]:
        folders = [coordinator, further(coordinator, 1), further(coordinator, 2)]
        values = theta(3, self.schema)
        for folder, ids in zip(folders, assign(self.schema, 3), strict=True):
            store = Store(folder.outer, folder.config(), folder.run_id)
            store.found(OuterState(self.schema.subset(ids), folder.config(), [values[i] for i in ids]))
            store.close()
        return folders, values

    def test_the_parts_are_one_model(self, coordinator: StateFolder, tmp_path: Path) -> None:
        folders, values = self.parts(coordinator)
        out = tmp_path / "model.safetensors"
        states = [argument for folder in reversed(folders) for argument in ("--state", folder.path)]
        assert f"outer step 0, digest {digest(values)[:12]}" in run("export", *states, "--out", out)
        named = load_file(out)
        assert list(named) == [f"l{i}.weight" for i in range(5)]
        assert all(torch.equal(named[f"l{i}.weight"].view(-1), value) for i, value in enumerate(values))
        shares = [digest([values[i] for i in share]) for share in assign(self.schema, 3)]
        with safe_open(out, "pt") as file:
            said = {"run_id": coordinator.run_id, "outer_step": "0", "digest": digest(values), "digests": ", ".join(shares)}
            assert file.metadata() == said

    def test_folders_that_are_not_those_of_one_run_are_refused(self, coordinator: StateFolder, tmp_path: Path) -> None:
        folders, _ = self.parts(coordinator)
        stranger = StateFolder.create(tmp_path / "other", TOML)
        for wrong, message in (
            (folders[:2], "the run has 3 aggregators; give the folder of aggregator 2, too"),
            (folders[1:], "give the folder of aggregator 0, too"),
            ([*folders, folders[1]], "4 folders of a run with 3 aggregators; give each one once"),
            ([stranger, *folders[1:]], "is of run spread-"),
        ):
            with pytest.raises(ConfigError, match=message):
                export_parameters(wrong, tmp_path / "out.safetensors")
        assert not (tmp_path / "out.safetensors").exists()
