"""configuration.json: what a peer that took part in a governed run holds a changed configuration to, over restarts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from edit.config.run import RunConfig
from edit.errors import EditError, RefusedError
from edit.trust.signatures import key_hash
from editpb.messages import ConfigChange, Configuration
from peers.carriers.hub.kept_configuration import KeptConfiguration
from tests.support.approvers import RUN, Approver, authority, configuration

ISSUER = authority()
PEM = ISSUER.certificate.public_bytes(Encoding.PEM)
ANN, BOB = (Approver.of(ISSUER, name) for name in ("ann", "bob"))
A, B = configuration(1), configuration(2, sync={"every": 3})
OFF = Configuration(1, RunConfig().to_json())
CHANGE = ConfigChange(B, (ANN.approves(A, B), BOB.approves(A, B)))


def opened(home: Path, run_id: str = RUN, members: dict[str, tuple[str, ...]] | None = None) -> KeptConfiguration:
    return KeptConfiguration.open(home, run_id, PEM, members)


def test_what_is_kept_is_held_to_after_a_restart(tmp_path: Path) -> None:
    kept = opened(tmp_path)
    assert kept.number == 0 and kept.check(A, ()) == ()
    kept.keep(A)
    kept = opened(tmp_path)
    assert kept.number == 1 and kept.check(A, ()) == ()
    with pytest.raises(RefusedError, match="its approvals are missing"):
        kept.check(B, ())
    assert kept.check(B, [CHANGE]) == ("ann", "bob")
    kept.keep(B)
    assert kept.number == opened(tmp_path).number == 2
    with pytest.raises(RefusedError, match="this peer took part under configuration 2"):
        opened(tmp_path).check(A, ())


def test_nothing_is_kept_of_a_run_without_approvers(tmp_path: Path) -> None:
    opened(tmp_path).keep(OFF)
    assert not list(tmp_path.iterdir())
    kept = opened(tmp_path)
    kept.keep(A)
    kept.keep(replace(OFF, number=2))  # which had its approvals: from now on all may change
    assert opened(tmp_path).check(B, ()) == ()


def test_a_number_that_a_coordinator_only_says_is_not_kept(tmp_path: Path) -> None:
    opened(tmp_path).keep(A)
    kept = opened(tmp_path)
    assert kept.check(replace(A, number=99), ()) == ()
    kept.keep(replace(A, number=99))
    assert kept.number == opened(tmp_path).number == 1


BACK = replace(A, number=3)
TAKEN_BACK = (CHANGE, ConfigChange(BACK, (ANN.approves(B, BACK), BOB.approves(B, BACK))))


def test_a_change_that_was_taken_back_counts_no_more_for_a_peer_that_was_away(tmp_path: Path) -> None:
    opened(tmp_path).keep(A)
    kept = opened(tmp_path)
    assert kept.check(BACK, TAKEN_BACK) == ("ann", "bob")
    kept.keep(BACK)
    kept = opened(tmp_path)
    assert kept.number == 3 and kept.check(BACK, ()) == kept.check(A, ()) == ()
    with pytest.raises(RefusedError, match=r"tells configuration 2, .* this peer took part under configuration 3"):
        kept.check(B, [CHANGE])


def test_only_the_number_that_was_shown_is_kept(tmp_path: Path) -> None:
    opened(tmp_path).keep(A)
    kept = opened(tmp_path)
    assert kept.check(BACK, [CHANGE, ConfigChange(BACK, CHANGE.approvals)]) == ()  # the approvals are of another change
    kept.keep(BACK)
    assert kept.number == opened(tmp_path).number == 1
    kept.check(BACK, TAKEN_BACK)
    kept.keep(replace(A, number=99))
    assert kept.number == opened(tmp_path).number == 1


def test_the_keys_of_known_members_count(tmp_path: Path) -> None:
    opened(tmp_path).keep(A)
    known = {"ann": (key_hash(ANN.signer.public_key),), "bob": ("0" * 64,)}
    with pytest.raises(RefusedError, match="the approval of bob is by another key than is known here"):
        opened(tmp_path, members=known).check(B, [CHANGE])
    known["bob"] = (key_hash(BOB.signer.public_key), "0" * 64)  # the approval is from before it got a new key
    assert opened(tmp_path, members=known).check(B, [CHANGE]) == ("ann", "bob")


def test_what_another_run_had_counts_for_nothing(tmp_path: Path) -> None:
    opened(tmp_path).keep(A)
    assert opened(tmp_path, "run2").number == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:-9],
        lambda text: "{}",
        lambda text: json.dumps(json.loads(text) | {"config": "["}),
        lambda text: json.dumps(json.loads(text) | {"number": "x"}),
        lambda text: json.dumps(json.loads(text) | {"format": 2}),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, change: Callable[[str], str]) -> None:
    opened(tmp_path).keep(A)
    path = tmp_path / "configuration.json"
    path.write_text(change(path.read_text()))
    with pytest.raises(EditError, match=r"configuration\.json") as caught:
        opened(tmp_path)
    assert caught.value.exit_code == 2
