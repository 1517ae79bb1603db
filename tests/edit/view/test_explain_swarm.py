"""`edit-peer explain` for a member of a swarm: each setting changes what it says, and it says no more than is true."""

from __future__ import annotations

import html
import inspect
import re
from dataclasses import fields, replace
from typing import Any

import pytest

from aggregator.control.shown_settings import settings_of
from edit.config.run import RunConfig
from edit.view import explain, explain_swarm
from edit.view import leaving as common
from edit.view.explain import STAYS, Leaving, leaving, of_swarm
from edit.web.page import render_page
from editpb.run_status import CouncilPart, CouncilStatus, RunStatus
from tests.edit.view.test_explain import by_what
from tests.edit.view.test_live import closed, status

COUNCIL = CouncilStatus(
    leader="a",
    quorum="3 of 3 here, 2 needed",
    lost=False,
    term=1,
    version=1,
    parts=tuple(CouncilPart(part=part, owner=owner, outer_step=4, held_by=3) for part, owner in enumerate("aba")),
    members=(),
)


def swarm(council: CouncilStatus | None = COUNCIL, **sections: dict[str, Any]) -> RunStatus:
    """A swarm's status, with the settings that its hosts show."""
    config = RunConfig.from_mapping({"swarm": {}, **sections})
    return replace(status(), rounds=(), settings=settings_of(config), council=council)


def told(role: str = "peer", **sections: dict[str, Any]) -> tuple[Leaving, ...]:
    return leaving(swarm(**sections), role, ())


def whats(entries: tuple[Leaving, ...]) -> str:
    return "\n".join(entry.what for entry in entries)


def words(entries: tuple[Leaving, ...]) -> str:
    return "\n".join(text for entry in entries for text in entry.as_json().values())


GOSSIP = {
    "outer": {"algorithm": "gossip"},
    "swarm": {"parts": 1},
    "gossip": {"settle_every": 8},
}


def test_contributions_go_to_the_owners_of_now_and_any_member_may_be_one() -> None:
    sent = by_what(told(codec={"up": "int4"}, sync={"every": 30}, storage={"keep_checkpoints": 4}), "contributions")
    assert sent.to.startswith(
        "the owner of each part of the model, now a (parts 0, 2), b (part 1); any member that others reach"
    )
    assert "codec int4 (codec.up), over mutual TLS; not masked and without noise" in sent.form
    assert "30 (sync.every) inner steps; again when a round is aborted or the part gets another owner" in sent.how_often
    assert "any member" in sent.seen_by and "inner steps" not in sent.seen_by
    assert sent.kept.endswith("the journal and 4 (storage.keep_checkpoints) checkpoints of every member")
    assert "verify" not in sent.to + sent.kept
    unknown = leaving(swarm(council=None), "peer", ())
    assert by_what(unknown, "contributions").to.startswith("the owner of each part of the model; any member")


def test_what_a_coordinator_would_get_is_nobodys_here() -> None:
    said = words(told(audit={"enabled": True}))
    assert "coordinator" not in said and "auditor" not in said and "scorer" not in said and "approv" not in said


def test_who_verifies_gets_contributions_too_and_peers_sign_them() -> None:
    found = told(swarm={"verify": 2})
    sent, signed = by_what(found, "contributions"), by_what(found, "a signature of each contribution")
    assert "from the owner also to 2 more, which merge it once more (swarm.verify)" in sent.to
    assert "and those who verify" in sent.kept
    assert "from there to those who verify" in signed.to and signed.kept == "with the contribution, until its round is closed"
    assert "signature of each contribution" not in whats(told()) and "audit log" not in words(found)


def test_with_an_audit_log_every_member_keeps_signatures_entries_and_consents() -> None:
    found = told(audit={"enabled": True, "keep_contributions": 2})
    assert "audit log of every member, which is not shortened" in by_what(found, "a signature of each contribution").kept
    assert "with the entries of the audit log to every member" in by_what(found, "a signature of each contribution").to
    assert "audit log of every member" in by_what(found, "as the owner of a part, the entry of each outer step").kept
    assert "audit log of every member" in by_what(found, "its site's consent").kept
    sent = by_what(found, "contributions")
    assert sent.seen_by.endswith("the merged result; members also see its inner steps and tokens (audit.enabled)")
    assert "at the owner each as it was sent, until 2 outer steps later (audit.keep_contributions)" in sent.kept
    plain = by_what(told(membership={"consent": True}), "its site's consent")
    assert "needed here" in plain.what and plain.kept == "in memory, until the owner has the part no more"


@pytest.mark.parametrize(
    ("shared", "said", "numbers"),
    [
        (False, "the operators of the owners, and whoever has the authority's key (membership", "without losses"),
        (True, "every member and observer (membership.share_losses = true)", "as numbers, whoever"),
    ],
)
def test_who_sees_losses_is_what_the_run_says(shared: bool, said: str, numbers: str) -> None:
    found = told(membership={"share_losses": shared, "heartbeat_s": 0.5, "lease_s": 2.0})
    reports = by_what(found, "reports")
    assert said in reports.seen_by and reports.how_often == "every 0.5 (membership.heartbeat_s) s to each owner"
    assert "metrics.jsonl and the three files before it" in reports.kept
    assert numbers in by_what(found, "how its host stands").to


def test_what_a_site_does_to_what_it_sends_is_told() -> None:
    found = leaving(swarm(swarm={"parts": 1}), "peer", (), clip=1.5, hidden=("loss", "step_s"))
    assert "shortened to a norm of at most 1.5 (protect.clip)" in by_what(found, "contributions").what
    assert "all without loss, step_s (protect.hide)" in by_what(found, "reports").what
    assert "protect" not in words(told())


def test_noise_in_the_gradients_is_told() -> None:
    private = {"level": "example", "delta": 1e-6, "epsilon_max": 8.0, "noise_multiplier": 1.0}
    found = told(privacy=private)
    assert "no more than eps 8.0 (privacy.epsilon_max) at delta 1e-06" in by_what(found, "contributions").form
    assert "no training loss" in by_what(found, "reports").what


def test_what_a_host_does_for_all_is_told() -> None:
    found = told(codec={"down": "bf16"}, swarm={"heartbeat_s": 0.125}, storage={"keep_checkpoints": 5})
    model, council = by_what(found, "the model, which it holds for all"), by_what(found, "what members agree on")
    assert "updates in codec bf16 (codec.down), states in plain fp32" in model.form
    assert model.kept == "in the journal and 5 (storage.keep_checkpoints) checkpoints of every member"
    assert council.how_often.startswith("every 0.125 (swarm.heartbeat_s) s") and "council.json" in council.kept
    assert "no key to it" in by_what(found, "all of this once more").form
    assert "share-authority" in by_what(found, "only from a member with the authority's key").what


def test_the_dht_is_told_unless_the_run_has_none() -> None:
    found = by_what(told(), "where its host is, if hivemind is installed")
    assert "members or not" in found.seen_by and found.kept == "in memory of those nodes, for 60 s"
    assert "hivemind" not in words(told(swarm={"discovery": "addresses"}))


def test_with_gossip_it_swaps_and_its_reports_stay() -> None:
    found = told(**GOSSIP)
    swaps, settling = by_what(found, "swaps"), by_what(found, "its outer parameters, if it trains")
    assert "and its outer parameters" in swaps.what and "in codec bf16 (gossip.codec)" in swaps.form
    assert "its reports stay at this site" in swaps.to and "drawn anew for each outer step" in swaps.to
    assert "without noise" in swaps.form and settling.form == "plain fp32, over mutual TLS"
    assert settling.how_often.startswith("every 8 (gossip.settle_every) outer steps")
    assert "contributions, if" not in whats(found) and "reports: " not in whats(found) and "consent" not in whats(found)
    model = by_what(found, "the model, which it holds for all")
    assert "the model of the last settling" in model.what and model.form == "plain fp32, over mutual TLS"
    assert model.how_often.startswith("an update with each settling; ")
    assert "how far apart the two were" in by_what(found, "how its host stands").what


def test_an_observer_sends_its_questions() -> None:
    (entry,) = told("observer", audit={"enabled": True})
    assert "its questions how the run stands" in entry.what and "relay" in entry.form


def test_its_size_is_measured_over_all_parts() -> None:
    first, later = (replace(closed(step), bytes_in=6_000_000, t=1000.0 + 864 * step) for step in (1, 2))
    found = leaving(replace(swarm(), rounds=(first, later)), "peer", ())
    assert "3.0 MB per outer step" in by_what(found, "contributions").size
    assert by_what(told(), "contributions").size == "not known before the first committed round"


def test_the_page_of_a_swarm_says_what_the_command_says() -> None:
    run = swarm()
    page = html.unescape(re.sub("<[^>]*>", "", render_page(run)))
    for entry in leaving(run, "peer", ()):
        assert entry.what in page and all(said in page for _, said in entry.about)
    assert STAYS[0] in page and "The run did not say its settings." in render_page(replace(run, settings=()))


def test_what_a_member_wrote_is_no_markup() -> None:
    hostile = replace(COUNCIL, parts=(CouncilPart(part=0, owner="<b>x\x1b[2J", outer_step=4, held_by=3),))
    (to, *_) = (entry.to for entry in leaving(swarm(council=hostile), "peer", ()) if entry.what.startswith("contributions"))
    assert "\x1b" not in to and "<b>x" not in render_page(swarm(council=hostile))


def test_a_swarm_is_known_by_its_settings_before_any_host_has_answered() -> None:
    assert of_swarm(swarm(council=None)) and of_swarm(swarm()) and not of_swarm(status())


def test_every_setting_that_it_names_is_one_of_a_swarm() -> None:
    """A setting that was renamed would be said as not known, and nobody would see it."""
    names = {each.name for each in swarm().settings}
    source = "".join(map(inspect.getsource, (explain, explain_swarm, common)))
    sections = {field.name for field in fields(RunConfig)} - {"secagg", "governance", "aggregators"}  # not in a swarm
    named = {name for name in re.findall(r"""["'](\w+\.\w+)["']""", source) if name.split(".")[0] in sections}
    assert {"swarm.verify", "swarm.heartbeat_s", "gossip.codec", "codec.down"} <= named <= names
