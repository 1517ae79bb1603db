"""One authority per run: what it signs, how an invitation is used up exactly once, who is shut out."""

from __future__ import annotations

import datetime
import errno
import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID

import aggregator.security.authority as authority_module
import aggregator.security.members as members_module
from aggregator.security.authority import Authority
from aggregator.security.certificates import key_pem, public_hash
from aggregator.security.members import Members
from edit.errors import ConfigError, EditError, RefusedError, RemoteProtocolError, StorageError
from editpb.identity import Identity, from_certificate
from editpb.invitation import Invitation

NOW = 1_800_000_000.0
RUN = "run-0123abcd"
DER = serialization.Encoding.DER


def request(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey, name: str = "anything") -> bytes:
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    algorithm = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    return x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, algorithm).public_bytes(DER)


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.create(tmp_path, RUN, ("127.0.0.1", "localhost", "::1"), now=NOW)


def invite(authority: Authority, peer_id: str = "alice", role: str = "peer", lifetime_s: float = 60.0) -> Invitation:
    return authority.invite(peer_id, role=role, enrol=("127.0.0.1:7701",), lifetime_s=lifetime_s, now=NOW)


def redeem(authority: Authority, token: str, key: ec.EllipticCurvePrivateKey, now: float = NOW) -> x509.Certificate:
    der, identity = authority.redeem(token, request(key), now=now)
    certificate = x509.load_der_x509_certificate(der)
    assert from_certificate(certificate) == identity
    return certificate


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---- what stands in the certificates -------------------------------------------------------------------------------------


def test_the_folder_of_a_new_run(authority: Authority, tmp_path: Path) -> None:
    names = {"ca.key", "ca.pem", "server.key", "server.pem", "operator.key", "operator.pem", "members.json"}
    assert set(files(tmp_path)) == names
    secret = [name for name in names if name.endswith(".key") or name == "members.json"]
    assert all((tmp_path / name).stat().st_mode & 0o077 == 0 for name in secret)
    assert [(m.peer_id, m.role) for m in authority.members.all()] == [("operator", "operator")]
    assert Authority.load(tmp_path, RUN).fingerprint == authority.fingerprint


def test_the_authority_may_sign_members_only(tmp_path: Path, authority: Authority) -> None:
    ca = x509.load_pem_x509_certificate((tmp_path / "ca.pem").read_bytes())
    assert ca.public_bytes(DER) == authority.ca_der
    constraints = ca.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical and constraints.value.ca and constraints.value.path_length == 0
    usage = ca.extensions.get_extension_for_class(x509.KeyUsage).value
    assert usage.key_cert_sign and not usage.digital_signature
    assert (ca.not_valid_after_utc.timestamp() - NOW) / 86400 == pytest.approx(3650)


@pytest.mark.parametrize(
    ("name", "purpose"), [("server", ExtendedKeyUsageOID.SERVER_AUTH), ("operator", ExtendedKeyUsageOID.CLIENT_AUTH)]
)
def test_the_coordinator_may_not_call_and_the_operator_may_not_serve(
    tmp_path: Path, authority: Authority, name: str, purpose: x509.ObjectIdentifier
) -> None:
    certificate = x509.load_pem_x509_certificate((tmp_path / f"{name}.pem").read_bytes())
    key = serialization.load_pem_private_key((tmp_path / f"{name}.key").read_bytes(), None)
    assert certificate.public_key() == key.public_key()
    certificate.verify_directly_issued_by(x509.load_der_x509_certificate(authority.ca_der))
    assert list(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == [purpose]
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_the_server_is_named_as_it_is_advertised(tmp_path: Path, authority: Authority) -> None:
    certificate = x509.load_pem_x509_certificate((tmp_path / "server.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1", "::1"]
    assert names.get_values_for_type(x509.DNSName) == ["localhost"]
    assert from_certificate(certificate) == Identity(RUN, "coordinator", "coordinator")


def test_the_servers_certificate_follows_the_advertised_names(tmp_path: Path, authority: Authority) -> None:
    before = files(tmp_path)
    assert not authority.renew_own(("127.0.0.1", "localhost", "::1"), now=NOW)
    assert files(tmp_path) == before
    assert authority.renew_own(("train.example",), now=NOW)
    after = files(tmp_path)
    assert {name for name in after if after[name] != before[name]} == {"server.pem"}, "the key stays"
    assert not authority.renew_own(("train.example",), now=NOW)
    assert authority.renew_own(("train.example",), now=NOW + 3640 * 86400)


@pytest.mark.parametrize("name", ["", "a b", "http://x", "x" * 64, "*.example", "é.example"])
def test_a_name_that_no_certificate_can_hold_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="is neither a host name nor an address"):
        Authority.create(tmp_path, RUN, ("localhost", name), now=NOW)
    assert not (tmp_path / "ca.key").exists()


def test_a_second_authority_would_shut_every_member_out(authority: Authority, tmp_path: Path) -> None:
    before = files(tmp_path)
    with pytest.raises(ConfigError, match="exists already"):
        Authority.create(tmp_path, RUN, ("localhost",), now=NOW)
    assert files(tmp_path) == before


def test_a_member_gets_the_invitations_identity_whatever_its_request_says(authority: Authority) -> None:
    key = new_key()
    der, identity = authority.redeem(invite(authority).token, request(key, "operator"), now=NOW)
    certificate = x509.load_der_x509_certificate(der)
    assert identity == Identity(RUN, "peer", "alice") == from_certificate(certificate)
    assert certificate.subject.rfc4514_string() == "CN=alice"
    assert certificate.public_key() == key.public_key()
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert len(list(names)) == 2
    assert names.get_values_for_type(x509.DNSName) == [identity.server_name]
    assert certificate.not_valid_after_utc.timestamp() == pytest.approx(NOW + 365 * 86400)
    assert certificate.not_valid_before_utc.timestamp() < NOW


@pytest.mark.parametrize(("role", "serves"), [("peer", [ExtendedKeyUsageOID.SERVER_AUTH]), ("observer", [])])
def test_of_the_members_only_a_peer_may_serve_and_only_under_its_own_name(
    authority: Authority, role: str, serves: list[x509.ObjectIdentifier]
) -> None:
    identity = Identity(RUN, role, "a")
    certificate = authority.issuer.issue(identity, new_key().public_key(), lifetime_s=100, now=NOW)
    purposes = list(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    assert purposes == [ExtendedKeyUsageOID.CLIENT_AUTH, *serves]
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [identity.server_name] * len(serves)


def test_no_certificate_outlives_the_authority(authority: Authority) -> None:
    late = NOW + 3649 * 86400
    public = new_key().public_key()
    certificate = authority.issuer.issue(Identity(RUN, "peer", "a"), public, lifetime_s=1e9, now=late)
    assert certificate.not_valid_after_utc.timestamp() == NOW + 3650 * 86400
    with pytest.raises(ConfigError, match="expired"):
        authority.issuer.issue(Identity(RUN, "peer", "a"), public, lifetime_s=1e9, now=late + 86400)


# ---- invitations ---------------------------------------------------------------------------------------------------------


def test_the_token_itself_is_not_kept(authority: Authority, tmp_path: Path) -> None:
    token = invite(authority).token
    redeem(authority, token, new_key())
    invite(authority)
    kept = files(tmp_path)
    assert not any(token.encode() in data or token in name for name, data in kept.items())
    invitations = list((tmp_path / "invitations").iterdir())
    assert len(invitations) == 2 and all(path.stat().st_mode & 0o077 == 0 for path in invitations)


def test_a_second_machine_cannot_use_it_and_changes_nothing(authority: Authority, tmp_path: Path) -> None:
    token = invite(authority).token
    redeem(authority, token, new_key())
    before = files(tmp_path)
    with pytest.raises(RefusedError, match="used already, by another key"):
        redeem(authority, token, new_key())
    assert files(tmp_path) == before


def test_the_same_key_gets_the_same_certificate_again_until_the_invitation_expires(authority: Authority) -> None:
    token, key = invite(authority).token, new_key()
    first = redeem(authority, token, key)
    assert redeem(authority, token, key, NOW + 59) == first
    with pytest.raises(RefusedError, match="expired"):
        redeem(authority, token, key, NOW + 60)


def test_who_asks_again_after_the_clock_was_set_right_gets_a_certificate_that_is_valid(authority: Authority) -> None:
    token, key, ahead = invite(authority, lifetime_s=86_400.0).token, new_key(), NOW + 5 * 3600
    early = redeem(authority, token, key, ahead)
    assert redeem(authority, token, key, ahead) == early
    right = redeem(authority, token, key)
    assert right.not_valid_before_utc.timestamp() < NOW < early.not_valid_before_utc.timestamp()
    assert redeem(authority, token, key, NOW + 1) == right


def test_after_the_clock_was_set_right_an_earlier_invitation_does_not_take_the_name_from_a_later_one(
    authority: Authority,
) -> None:
    earlier, later = (invite(authority, lifetime_s=86_400.0).token for _ in range(2))
    key = new_key()
    redeem(authority, earlier, key, NOW + 5 * 3600)
    last = redeem(authority, later, new_key())
    with pytest.raises(RefusedError, match="a later invitation for alice was used"):
        redeem(authority, earlier, key)
    assert authority.members.why_refused(Identity(RUN, "peer", "alice"), last) is None


def test_a_later_invitation_to_a_swarm_is_valid_and_the_later_one_also_after_the_clock_was_set_back(
    authority: Authority,
) -> None:
    def guest(now: float, after: str = "") -> x509.Certificate:
        access = {"a": ("127.0.0.1:1",)}
        invitation = authority.invite_to_swarm("b", hosts=access, lifetime_s=60.0, now=now, after=after)
        assert invitation.swarm is not None
        return x509.load_der_x509_certificate(invitation.swarm.certificate)

    ahead = guest(NOW + 50 * 3600)
    right = guest(NOW, f"{ahead.serial_number:032x}")
    assert right.serial_number > ahead.serial_number
    assert right.not_valid_before_utc.timestamp() < NOW < right.not_valid_after_utc.timestamp() <= NOW + 61


@pytest.mark.parametrize("module", [members_module, authority_module], ids=["members.json", "the certificate"])
def test_a_crash_between_claim_and_certificate_burns_nothing_for_that_key(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType
) -> None:
    token, key = invite(authority).token, new_key()

    def full(path: Path, values: object, *, version: int, mode: int) -> None:
        raise StorageError(f"{path}: cannot be written (No space left on device)")

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_json", full)
        with pytest.raises(StorageError):
            redeem(authority, token, key)
    again = Authority.load(tmp_path, RUN)
    with pytest.raises(RefusedError, match="used already"):
        redeem(again, token, new_key())
    certificate = redeem(again, token, key)
    record = again.members.get("alice")
    assert record is not None and record.serial == f"{certificate.serial_number:x}"


def test_an_earlier_invitation_is_void_once_a_later_one_for_the_name_was_used(authority: Authority, tmp_path: Path) -> None:
    first, _, later, key = *(invite(authority).token for _ in range(3)), new_key()
    bob = invite(authority, "bob").token
    before = redeem(authority, first, key)
    second, joined = invite(authority).token, new_key()
    redeem(authority, second, joined)
    again = Authority.load(tmp_path, RUN)
    with pytest.raises(RefusedError, match="a later invitation for alice was used; ask the run's operator for a new one"):
        redeem(again, later, new_key())
    assert redeem(again, first, key) == before, "the same key may repeat"
    record = again.members.get("alice")
    assert record is not None and record.key == public_hash(redeem(again, second, joined))
    redeem(again, bob, new_key())
    redeem(again, invite(again).token, new_key())


def test_a_claim_without_a_certificate_is_void_once_a_later_invitation_was_used(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, key = invite(authority).token, new_key()

    def full(*_: object) -> str:
        raise StorageError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(authority, "_enrol", full)
        with pytest.raises(StorageError):
            redeem(authority, token, key)
    redeem(authority, invite(authority).token, new_key())
    with pytest.raises(RefusedError, match="a later invitation for alice was used"):
        redeem(authority, token, key)


def test_an_invitation_of_before_there_were_numbers_counts_until_a_later_one_was_used(
    authority: Authority, tmp_path: Path
) -> None:
    tokens = [invite(authority).token for _ in range(2)]
    for path in (tmp_path / "invitations").iterdir():
        path.write_text(re.sub(r',\s*"number": [0-9]+', "", path.read_text()))
        assert "number" not in path.read_text()
    redeem(authority, tokens[1], new_key())
    later = invite(authority).token
    redeem(authority, later, new_key())
    with pytest.raises(RefusedError, match="a later invitation for alice was used"):
        redeem(authority, tokens[0], new_key())


def test_invitations_that_cannot_be_listed_were_not_all_unused(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = invite(authority).token
    redeem(authority, token, new_key())
    again = Authority.load(tmp_path, RUN)

    def refused(folder: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))

    monkeypatch.setattr(os, "scandir", refused)  # what `Path.glob` asks
    monkeypatch.setattr(Path, "iterdir", refused)
    for ask in (lambda: invite(again), lambda: redeem(again, token, new_key())):
        with pytest.raises(StorageError, match=r"invitations: cannot be read \(Permission denied\)"):
            ask()


def test_a_damaged_invitation_concerns_nobody_else(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, bob = tmp_path / "invitations", invite(authority, "bob").token
    redeem(authority, invite(authority).token, new_key())
    (used,) = folder.glob("*.used")
    used.write_bytes(b"")
    carol, again = invite(authority, "carol").token, invite(authority, "alice")
    unused = folder / f"{hashlib.sha256(carol.encode()).hexdigest()}.json"
    unused.write_text('{"peer_id": "carol"')
    redeem(authority, bob, new_key())
    redeem(authority, again.token, new_key())
    redeem(authority, invite(authority, "dora").token, new_key())
    said = "is damaged, and is passed over; nobody can redeem this invitation any more"
    assert sorted(caplog.messages) == sorted(f"{path}: {said}" for path in (used, unused))
    with pytest.raises(StorageError, match="is damaged; delete it and invite again"):
        redeem(authority, carol, new_key())


def test_an_earlier_invitation_is_void_also_where_the_later_one_is_damaged(authority: Authority, tmp_path: Path) -> None:
    first, later, key = invite(authority).token, invite(authority).token, new_key()
    redeem(authority, later, key)
    (used,) = (tmp_path / "invitations").glob("*.used")
    used.write_bytes(b"")
    again = Authority.load(tmp_path, RUN)
    redeem(again, invite(again).token, key)  # its number is greater
    with pytest.raises(RefusedError, match="a later invitation for alice was used"):
        redeem(Authority.load(tmp_path, RUN), first, new_key())
    members = tmp_path / "members.json"
    members.write_text(re.sub(r'"redeemed": {[^}]*}', '"redeemed": {}', members.read_text()))  # of an earlier version
    for path in (tmp_path / "invitations").glob("*.used"):
        path.write_bytes(b"")
    with pytest.raises(StorageError, match=r"used: is damaged; delete it and invite again"):
        redeem(Authority.load(tmp_path, RUN), first, new_key())


def test_an_expired_one_is_refused_and_can_not_be_used_later_either(authority: Authority) -> None:
    token = invite(authority).token
    for now in (NOW + 60, NOW + 1e6):
        with pytest.raises(RefusedError, match="has expired"):
            redeem(authority, token, new_key(), now)


@pytest.mark.parametrize("token", ["", "x" * 43, "../ca.key", "*" * 43, "x" * 10_000, "\0" * 43])
def test_an_unknown_one_is_refused(authority: Authority, token: str) -> None:
    with pytest.raises(RefusedError, match="not known here"):
        redeem(authority, token, new_key())


def test_an_invitation_of_another_run_is_unknown(authority: Authority, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Authority.create(tmp_path / "other", "other-1", ("localhost",), now=NOW)
    with pytest.raises(RefusedError, match="not known here"):
        redeem(authority, invite(other).token, new_key())


def damaged_signature() -> bytes:
    data = bytearray(request(new_key()))
    data[-1] ^= 1
    return bytes(data)


@pytest.mark.parametrize(
    ("csr", "reason"),
    [
        (lambda: b"", "0 bytes"),
        (lambda: bytes(5000), "5000 bytes"),
        (lambda: b"\x30\x03abc", "damaged"),
        (lambda: request(new_key())[:-4], "damaged"),
        (damaged_signature, "not signed with its own key|damaged"),
        (lambda: request(rsa.generate_private_key(65537, 2048)), "not P-256"),
        (lambda: request(ed25519.Ed25519PrivateKey.generate()), "not P-256"),
        (lambda: request(ec.generate_private_key(ec.SECP384R1())), "not P-256"),
    ],
)
def test_a_bad_request_is_the_senders_fault_and_uses_nothing_up(
    authority: Authority, csr: Callable[[], bytes], reason: str
) -> None:
    token = invite(authority).token
    with pytest.raises(RemoteProtocolError, match=reason):
        authority.redeem(token, csr(), now=NOW)
    redeem(authority, token, new_key())


@pytest.mark.parametrize(
    ("peer_id", "role", "error"),
    [
        ("a b", "peer", "peer_id 'a b': must be 1 to 64"),
        ("", "peer", "peer_id"),
        ("a" * 65, "peer", "peer_id"),
        ("alice", "root", "role 'root': must be one of peer, region, observer, auditor, scorer, operator$"),
        ("alice", "relay", "role 'relay': must be one of peer, region, observer, auditor, scorer, operator$"),
        ("alice", "coordinator", "role 'coordinator': must be one of"),
        ("operator", "operator", "cannot be invited"),
    ],
)
def test_a_wrong_name_or_role_is_not_invited(authority: Authority, peer_id: str, role: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        invite(authority, peer_id, role)


@pytest.mark.parametrize("enrol", [(), ("host",), ("host:0",), ("a:1",) * 17])
def test_an_invitation_needs_addresses(authority: Authority, enrol: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="addresses HOST:PORT"):
        authority.invite("alice", role="peer", enrol=enrol, lifetime_s=1, now=NOW)


# ---- members -------------------------------------------------------------------------------------------------------------


def test_a_new_machine_for_the_same_identity_replaces_the_certificate(authority: Authority) -> None:
    first = redeem(authority, invite(authority).token, new_key())
    second = redeem(authority, invite(authority).token, new_key())
    alice = Identity(RUN, "peer", "alice")
    assert authority.members.why_refused(alice, second) is None
    assert "replaced by a newer one" in (authority.members.why_refused(alice, first) or "")
    assert len(authority.members.all()) == 2


def test_a_name_has_one_role(authority: Authority) -> None:
    redeem(authority, invite(authority).token, new_key())
    with pytest.raises(RefusedError, match="alice is a member as peer already"):
        invite(authority, "alice", "observer")
    assert "as peer, not as operator" in (authority.members.why_refused(Identity(RUN, "operator", "alice")) or "")


def test_an_evicted_member_stays_out(authority: Authority, tmp_path: Path) -> None:
    pending, key = invite(authority).token, new_key()
    used = invite(authority).token
    redeem(authority, used, key)
    authority.members.evict("alice", "key\nlost")
    again = Authority.load(tmp_path, RUN)
    assert again.members.why_refused(Identity(RUN, "peer", "alice")) == "key lost"
    for attempt in (lambda: redeem(again, pending, new_key()), lambda: redeem(again, used, key), lambda: invite(again)):
        with pytest.raises(RefusedError, match=r"alice was evicted \(key lost\); choose another name"):
            attempt()


def test_an_open_invitation_is_told_until_it_expires(authority: Authority, tmp_path: Path) -> None:
    invite(authority, "alice", "region", lifetime_s=60.0)
    (tmp_path / "invitations" / f"{'0' * 64}.json").write_text("damaged")
    assert [authority.invited(name, NOW) for name in ("alice", "bob")] == ["region", ""]
    assert authority.invited("alice", NOW + 60) == ""


def test_who_was_never_enrolled_is_refused_and_cannot_be_evicted(authority: Authority) -> None:
    assert authority.members.why_refused(Identity(RUN, "peer", "mallory")) == "mallory is not a member of this run"
    for peer_id, reason in (("mallory", "not a member"), ("operator", "cannot be evicted")):
        with pytest.raises(RefusedError, match=reason):
            authority.members.evict(peer_id, "x")
    assert authority.members.why_refused(Identity(RUN, "operator", "operator")) is None


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[1]",
        "[{}]",
        '[{"peer_id": "a"}]',
        "7",
        '[{"peer_id": "a", "role": "peer", "serial": "1f", "issued": "soon"}]',
        '[{"peer_id": "a", "role": "peer", "serial": "1f", "issued": 1, "expires": true}]',
        '[{"peer_id": "a", "role": "peer", "serial": "zz", "issued": 1}]',
        '[{"peer_id": 3, "role": "peer", "serial": "1f", "issued": 1}]',
        '[{"peer_id": "a", "role": "peer", "serial": "1f", "issued": 1, "evicted": 3}]',
    ],
)
def test_a_damaged_list_of_members_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "members.json").write_text(text)
    with pytest.raises(StorageError, match=r"members\.json: is damaged"):
        Members(tmp_path / "members.json")


@pytest.mark.parametrize("name", ["ca.key", "ca.pem"])
@pytest.mark.parametrize("content", [None, b"", b"-----BEGIN NONSENSE-----"])
def test_a_missing_or_damaged_authority_is_named(
    authority: Authority, tmp_path: Path, name: str, content: bytes | None
) -> None:
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(EditError, match=name.replace(".", r"\.")):
        Authority.load(tmp_path, RUN)


def test_a_key_of_another_authority_is_noticed(authority: Authority, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    Authority.create(tmp_path / "other", "other-1", ("localhost",), now=NOW)
    (tmp_path / "other" / "ca.key").replace(tmp_path / "ca.key")
    with pytest.raises(ConfigError, match="do not belong together"):
        Authority.load(tmp_path, RUN)


@pytest.mark.parametrize(
    ("key", "identified", "reason"),
    [
        (rsa.generate_private_key(65537, 2048), True, r"ca\.key: is not a P-256 key"),
        (ed25519.Ed25519PrivateKey.generate(), True, r"ca\.key: is not a P-256 key"),
        (ec.generate_private_key(ec.SECP384R1()), True, r"ca\.key: is not a P-256 key"),
        (new_key(), False, r"ca\.pem: has no subject key identifier"),
    ],
)
def test_an_authority_of_ones_own_that_cannot_sign_members_is_refused_with_the_reason(
    authority: Authority, tmp_path: Path, key: ec.EllipticCurvePrivateKey, identified: bool, reason: str
) -> None:
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "corp CA")])
    begins, ends = (datetime.datetime.fromtimestamp(NOW + days * 86400, datetime.UTC) for days in (-1, 3000))
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key()).serial_number(1)
    builder = builder.not_valid_before(begins).not_valid_after(ends)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    if identified:
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    own = builder.sign(key, None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256())
    (tmp_path / "ca.pem").write_bytes(own.public_bytes(serialization.Encoding.PEM))
    (tmp_path / "ca.key").write_bytes(key_pem(key))
    with pytest.raises(ConfigError, match=reason):
        Authority.load(tmp_path, RUN)
