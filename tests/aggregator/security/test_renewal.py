"""A certificate is renewed over the one before it, for the same key; what ends soon is told once for each limit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from aggregator.security.authority import Authority
from aggregator.security.certificates import key_pem, new_key
from aggregator.security.expiry import ExpiryWatch, watched_files, watched_members
from aggregator.security.members import Members
from edit.errors import ConfigError, StaleError
from editpb.identity import Identity, from_certificate
from editpb.validity import DAY_S, Notice, Validity

NOW = 1_800_000_000.0
RUN = "run-0123abcd"
ALICE = Identity(RUN, "peer", "alice")
NAMES = ("127.0.0.1",)
DUE = NOW + 250 * DAY_S


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.create(tmp_path, RUN, NAMES, now=NOW)


def enrol(authority: Authority, key: ec.EllipticCurvePrivateKey, now: float = NOW) -> x509.Certificate:
    certificate = authority.issuer.issue(ALICE, key.public_key(), lifetime_s=365 * DAY_S, now=now)
    authority.members.add(ALICE, certificate, now)
    return certificate


def renew(authority: Authority, certificate: x509.Certificate, now: float = DUE) -> x509.Certificate:
    return x509.load_der_x509_certificate(authority.renew(ALICE, certificate, now=now))


def pem(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


# ---- of a member ---------------------------------------------------------------------------------------------------------


def test_it_is_for_the_same_identity_and_key_and_ends_later(authority: Authority) -> None:
    first = enrol(authority, new_key())
    second = renew(authority, first)
    assert from_certificate(second) == ALICE and second.public_key() == first.public_key()
    assert Validity.of(second).ends == pytest.approx(DUE + 365 * DAY_S)
    record = authority.members.get("alice")
    assert record is not None and (record.serial, record.expires) == (f"{second.serial_number:x}", Validity.of(second).ends)


def test_both_are_accepted_until_they_expire(authority: Authority) -> None:
    """Other ranks, and calls under way, go on with the one before."""
    first = enrol(authority, new_key())
    second = renew(authority, first)
    assert authority.members.why_refused(ALICE, first) is None is authority.members.why_refused(ALICE, second)
    assert authority.members.valid_until("alice", first) == Validity.of(second).ends


def test_a_new_machine_shuts_out_all_certificates_of_the_key_before(authority: Authority) -> None:
    first = enrol(authority, new_key())
    second = renew(authority, first)
    third = enrol(authority, new_key(), DUE + 1)
    for certificate in (first, second):
        assert "replaced by a newer one" in (authority.members.why_refused(ALICE, certificate) or "")
        assert authority.members.valid_until("alice", certificate) == 0.0
    assert authority.members.why_refused(ALICE, third) is None


def test_one_that_is_not_due_is_not_renewed(authority: Authority, tmp_path: Path) -> None:
    first = enrol(authority, new_key())
    before = (tmp_path / "members.json").read_bytes()
    with pytest.raises(StaleError, match=r"the certificate of alice is not due for renewal: it expires in 165 days, on"):
        renew(authority, first, NOW + 200 * DAY_S)
    assert (tmp_path / "members.json").read_bytes() == before


def test_who_asks_again_gets_the_same_and_costs_no_write(authority: Authority, tmp_path: Path) -> None:
    first = enrol(authority, new_key())
    second = renew(authority, first)
    before = (tmp_path / "members.json").stat().st_ino
    assert renew(authority, first, DUE + 60) == second == renew(authority, second, DUE + 120)
    assert (tmp_path / "members.json").stat().st_ino == before


def test_who_asks_again_after_the_clock_was_set_right_gets_another_one(authority: Authority) -> None:
    first = enrol(authority, new_key())
    early = renew(authority, first, DUE + 5 * 3600)
    second = renew(authority, first)
    assert Validity.of(early).notice(DUE) is Notice.NOT_YET
    assert Validity.of(second).notice(DUE) is Notice.NONE and renew(authority, first) == second
    assert authority.members.why_refused(ALICE, first) is None is authority.members.why_refused(ALICE, second)


def test_a_lost_answer_and_a_restart_lose_nothing(authority: Authority, tmp_path: Path) -> None:
    first = enrol(authority, new_key())
    renew(authority, first)  # and the answer is lost
    again = Authority.load(tmp_path, RUN)
    third = renew(again, first, DUE + 1)
    assert again.members.why_refused(ALICE, third) is None is again.members.why_refused(ALICE, first)


def test_nothing_is_promised_beyond_the_end_of_the_authority(authority: Authority, tmp_path: Path) -> None:
    late = NOW + 3640 * DAY_S
    certificate = enrol(authority, new_key(), late)
    before = (tmp_path / "members.json").read_bytes()
    with pytest.raises(
        StaleError, match=r"the run's authority expires in 36 h, .*; no certificate outlives it: make a new run"
    ):
        renew(authority, certificate, late + 8.5 * DAY_S)
    assert (tmp_path / "members.json").read_bytes() == before


def test_of_two_of_the_same_second_a_further_aggregator_knows_the_later_one(tmp_path: Path, authority: Authority) -> None:
    """A date in a certificate has whole seconds; the coordinator's clock may also have been set back a little."""
    for later in (1e-3, 0.3, -1800.0):
        members = Members(tmp_path / f"seen{later}.json", new=True, enrols=False)
        first, second = redeem(authority, NOW + 5), redeem(authority, NOW + 5 + later)
        for certificate in (first, second, first):
            members.add_caller(ALICE, certificate)
        assert members.why_refused(ALICE, second) is None
        assert "replaced by a newer one" in (members.why_refused(ALICE, first) or "")


def redeem(authority: Authority, now: float) -> x509.Certificate:
    return x509.load_der_x509_certificate(_redeemed(authority, now))


def _redeemed(authority: Authority, now: float) -> bytes:
    from tests.aggregator.security.test_authority import request

    token = authority.invite("alice", role="peer", enrol=("127.0.0.1:7701",), lifetime_s=1e6, now=now).token
    return authority.redeem(token, request(new_key()), now=now)[0]


@pytest.mark.parametrize("enrols", [True, False])
def test_members_of_format_2_are_read_and_what_they_lack_is_learned(tmp_path: Path, authority: Authority, enrols: bool) -> None:
    first = enrol(authority, new_key())
    rows = [{"peer_id": "alice", "role": "peer", "serial": f"{first.serial_number:x}", "issued": NOW, "evicted": None}]
    (tmp_path / "members.json").write_text(json.dumps({"format": 2, "members": rows}))
    members = Members(tmp_path / "members.json", enrols=enrols)
    other = authority.issuer.issue(ALICE, new_key().public_key(), lifetime_s=60, now=NOW - 1)
    assert members.why_refused(ALICE, first) is None and members.why_refused(ALICE, other) is not None
    for certificate in (other, first):
        members.add_caller(ALICE, certificate)
    kept = Members(tmp_path / "members.json").get("alice")
    assert kept is not None and (kept.expires, bool(kept.key)) == (Validity.of(first).ends, True)


# ---- of the server and the operator --------------------------------------------------------------------------------------


def test_the_servers_is_renewed_after_two_thirds_of_its_year_and_keeps_its_key(tmp_path: Path, authority: Authority) -> None:
    first, key = pem(tmp_path / "server.pem"), (tmp_path / "server.key").read_bytes()
    assert Validity.of(first).ends == pytest.approx(NOW + 365 * DAY_S)
    assert authority.renew_own(NAMES, now=NOW + 240 * DAY_S) == ()
    assert authority.renew_own(NAMES, now=DUE) == ("server.pem",)
    assert authority.renew_own(NAMES, now=DUE) == ()
    second = pem(tmp_path / "server.pem")
    assert second.public_key() == first.public_key() and (tmp_path / "server.key").read_bytes() == key
    assert Validity.of(second).ends == pytest.approx(DUE + 365 * DAY_S)


def test_one_that_is_not_valid_yet_is_renewed_unless_the_authority_is_not_either(tmp_path: Path, authority: Authority) -> None:
    assert authority.renew_own(NAMES, now=DUE) == ("server.pem",), "the clock was ahead once"
    assert authority.renew_own(NAMES, now=NOW - 10 * DAY_S) == (), "and is behind"
    assert authority.renew_own(NAMES, now=NOW) == ("server.pem",)
    assert Validity.of(pem(tmp_path / "server.pem")).begins < NOW
    assert authority.renew_own(NAMES, now=NOW) == ()


def test_a_missing_key_is_made_anew_with_a_certificate_that_fits(tmp_path: Path, authority: Authority) -> None:
    (tmp_path / "server.key").unlink()
    assert authority.renew_own(NAMES, now=NOW) == ("server.pem",)
    assert (tmp_path / "server.key").stat().st_mode & 0o777 == 0o600
    assert authority.renew_own(NAMES, now=NOW) == ()


def test_a_key_of_something_else_gets_a_certificate_that_fits(tmp_path: Path, authority: Authority) -> None:
    (tmp_path / "server.key").write_bytes(key_pem(new_key()))
    assert authority.renew_own(NAMES, now=NOW) == ("server.pem",)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.write_text("x"), r"server\.key: is not a private key; remove it, and another one is made"),
        (lambda path: path.chmod(0o644), r"server\.key: others can read this key \(mode 0644\); run: chmod 600"),
    ],
)
def test_a_damaged_or_readable_key_of_the_server_is_one_line(tmp_path: Path, authority: Authority, damage, said: str) -> None:  # type: ignore[no-untyped-def]
    damage(tmp_path / "server.key")
    with pytest.raises(ConfigError, match=said):
        authority.renew_own(NAMES, now=NOW)


def test_near_the_end_of_the_authority_nothing_is_written_again_and_again(tmp_path: Path, authority: Authority) -> None:
    late = NOW + 3600 * DAY_S
    assert "server.pem" in authority.renew_own(NAMES, now=late)
    for day in (1, 20, 49):
        assert authority.renew_own(NAMES, now=late + day * DAY_S) == ()


# ---- what is told --------------------------------------------------------------------------------------------------------


def test_each_limit_is_told_once_and_a_renewed_certificate_begins_anew(authority: Authority, tmp_path: Path) -> None:
    certificate = enrol(authority, new_key())
    watch = ExpiryWatch()

    def news(now: float) -> list[tuple[str, str]]:
        return [(peer_id, text.partition(",")[0]) for peer_id, text in watch.news(watched_members(authority.members), now)]

    end = NOW + 365 * DAY_S
    assert news(end - 31 * DAY_S) == []
    assert news(end - 30 * DAY_S) == [("alice", "its certificate expires in 30 days")]
    assert news(end - 20 * DAY_S) == []
    assert news(end - 7 * DAY_S) == [("alice", "its certificate expires in 7 days")]
    assert news(end - DAY_S) == []
    second = renew(authority, certificate, end - DAY_S)
    assert news(end) == []
    again = Validity.of(second).ends
    assert news(again + DAY_S) == [("alice", "its certificate expired on 2029-01-13 08:00 UTC")]
    authority.members.evict("alice", "bad manners")
    assert ExpiryWatch().news(watched_members(authority.members), again) == []


def test_a_clock_that_is_behind_is_named(authority: Authority, tmp_path: Path) -> None:
    news = ExpiryWatch().news(watched_files(tmp_path, authority), NOW - 6 * 3600)
    assert [text.partition(" on: ")[2] for _, text in news] == [
        "this machine's clock is at least 5 h behind; set the clock"
    ] * 2


@pytest.mark.parametrize(("enrols", "mend"), [(True, "`serve` renews it by itself"), (False, "new-aggregator` and copy")])
def test_the_servers_own_end_is_told_with_the_mend(authority: Authority, tmp_path: Path, enrols: bool, mend: str) -> None:
    news = ExpiryWatch().news(watched_files(tmp_path, authority if enrols else None), NOW + 360 * DAY_S)
    ((peer_id, text),) = news
    assert peer_id == "" and text.startswith("the certificate of this server expires in 5 days, on ") and mend in text
