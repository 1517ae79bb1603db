"""`edit-peer explain`: what leaves a site, by what the run says of its configuration."""

from __future__ import annotations

import html
import inspect
import io
import json
import re
from dataclasses import fields, replace

import pytest
from rich.console import Console

from aggregator.control.shown_settings import settings_of
from edit.config.run import RunConfig
from edit.view import explain
from edit.view.explain import STAYS, Leaving, leaving, print_leaving
from edit.web.page import render_page
from editpb.run_status import RunStatus, Setting
from tests.edit.view.test_live import closed, status

AT = ("hub.example:7700",)


def configured(base: RunStatus | None = None, **values: object) -> RunStatus:
    named = {
        "codec__up": "int8",
        "sync__every": 50,
        "membership__heartbeat_s": 2.0,
        "membership__share_losses": False,
        **values,
    }
    rows = (Setting(name=name.replace("__", "."), value=json.dumps(value), default="null") for name, value in named.items())
    return replace(base or replace(status(), rounds=()), settings=tuple(rows))


def test_what_noise_does_to_contributions_and_reports_is_said() -> None:
    values = {"privacy__level": "example", "privacy__unit": "sequence", "privacy__delta": 1e-6, "privacy__epsilon_max": 8.0}
    told = leaving(configured(**values), "peer", AT)
    assert "no more than eps 8.0 (privacy.epsilon_max) at delta 1e-06" in by_what(told, "contributions").form
    assert "no training loss" in by_what(told, "reports").what
    plain = leaving(configured(privacy__level="none"), "peer", AT)
    assert "without noise" in by_what(plain, "contributions").form and "--hide-loss" in by_what(plain, "reports").what


def test_what_noise_at_the_coordinator_does_and_who_sees_what_is_before_it_is_said() -> None:
    values = {"privacy__level": "organisation", "privacy__clip": 2.0, "privacy__delta": 1e-5, "privacy__epsilon_max": 4.0}
    told = leaving(replace(configured(**values), epsilon=1.53), "peer", AT)
    sent = by_what(told, "contributions")
    assert "without noise, so the operator can learn something about the data" in sent.form
    assert "shortens it to at most 2.0 (privacy.clip) and adds noise before anybody else" in sent.form
    assert "no more than eps 4.0 (privacy.epsilon_max) at delta 1e-05 (privacy.delta) allows (so far eps 1.53)" in sent.form
    assert sent.seen_by == (
        "the operator of each aggregator; other members see verdicts, and the merged result, which has noise"
    )
    assert "--hide-loss" in by_what(told, "reports").what


def test_what_masks_hide_is_said() -> None:
    told = leaving(configured(secagg__enabled=True, secagg__bits=16, secagg__min_peers=3), "peer", AT)
    sent = by_what(told, "contributions")
    assert (
        "masked integers of 16 (secagg.bits) bits" in sent.form
        and "the sum of at least 3 (secagg.min_peers) peers" in sent.form
    )
    assert "the norm of each fragment" in sent.what and "the sum of all peers" in sent.seen_by
    assert "each sealed for one other peer" in by_what(told, "keys of each round").what
    plain = leaving(configured(secagg__enabled=False), "peer", AT)
    assert "not masked" in by_what(plain, "contributions").form and not any("keys of each" in each.what for each in plain)


def by_what(told: tuple[Leaving, ...], begins: str) -> Leaving:
    return next(entry for entry in told if entry.what.startswith(begins))


def test_the_page_says_what_the_command_says_without_the_addresses() -> None:
    run = configured()
    page = html.unescape(re.sub("<[^>]*>", "", render_page(run)))
    for entry in leaving(run, "peer", ()):
        assert entry.what in page and all(words in page for _, words in entry.about)
    assert STAYS[0] in page and "the coordinator (" not in page
    assert "The run did not say its settings." in render_page(replace(run, settings=()))


def test_what_a_run_says_is_no_markup() -> None:
    assert "<b>x" not in render_page(configured(codec__up="<b>x"))


def test_a_contribution_goes_to_every_aggregator_in_the_codec_of_the_run() -> None:
    told = by_what(leaving(configured(aggregators__addresses=["b.example:7710"]), "peer", AT), "contributions")
    assert "hub.example:7700" in told.to and "b.example:7710" in told.to
    assert "int8" in told.form and "not masked" in told.form
    assert "50 (sync.every) inner steps" in told.how_often


def test_signatures_are_told_where_the_run_keeps_a_log_and_nowhere_else() -> None:
    told = by_what(leaving(configured(audit__enabled=True), "peer", AT), "a signature of each contribution")
    assert "hub.example:7700" in told.to and "not in it" in told.kept
    without = leaving(configured(audit__enabled=False), "peer", AT)
    assert not any("signature of each contribution" in entry.what for entry in without)


def test_other_codecs_of_some_fragments_and_a_schedule_by_time_are_said() -> None:
    timed = configured(sync__schedule="time", sync__time_s=30.0, codec__fragments={"embedding*": {"up": "topk"}})
    told = by_what(leaving(timed, "peer", AT), "contributions")
    assert "other codecs for some fragments" in told.form and "30.0 (sync.time_s) seconds" in told.how_often


def test_its_size_is_measured_and_before_any_commit_it_is_not_known() -> None:
    assert by_what(leaving(configured(), "peer", AT), "contributions").size == "not known before the first committed round"
    first, later = (replace(closed(step), bytes_in=6_000_000, t=1000.0 + 864 * step) for step in (1, 2))
    peers = sum(peer.verdict not in ("absent", "carried") for peer in first.peers)
    assert peers == 2
    told = by_what(leaving(configured(replace(status(), rounds=(first, later))), "peer", AT), "contributions").size
    assert "3.0 MB per outer step" in told and "300 MB per day" in told


@pytest.mark.parametrize(
    ("shared", "words"), [(False, "the operator alone"), (True, "every member (membership.share_losses = true)")]
)
def test_who_sees_losses_is_what_the_run_says(shared: bool, words: str) -> None:
    assert words in by_what(leaving(configured(membership__share_losses=shared), "peer", AT), "reports").seen_by


@pytest.mark.parametrize("role", ["observer", "operator"])
def test_a_member_that_does_not_train_sends_only_its_calls(role: str) -> None:
    (entry,) = leaving(configured(), role, AT)
    assert entry.what == "its certificate and the address that it connects from"


def test_what_a_coordinator_leaves_out_or_garbles_is_not_made_up() -> None:
    garbled = replace(status(), rounds=(), settings=(Setting(name="codec.up", value="{", default="null"),))
    told = leaving(garbled, "peer", AT)
    assert "codec (codec.up)" in by_what(told, "contributions").form
    assert "others if the run shares them" in by_what(told, "reports").seen_by


def test_what_a_coordinator_wrote_is_text_on_the_terminal() -> None:
    out = io.StringIO()
    print_leaving(Console(file=out, width=100), "run-1", "a", leaving(configured(codec__up="[red]\x1b[2J"), "peer", AT))
    assert "[red]" in out.getvalue() and "\x1b" not in out.getvalue()
    assert "Not sent: the training data" in out.getvalue()


def test_every_setting_that_it_names_is_one_of_the_run() -> None:
    """A setting that was renamed would be said as not known, and nobody would see it."""
    names = {each.name for each in settings_of(RunConfig())}
    source = inspect.getsource(explain)
    sections = {field.name for field in fields(RunConfig)}
    named = {name for name in re.findall(r"""["'](\w+\.\w+)["']""", source) if name.split(".")[0] in sections}
    assert len(named) >= 7 and named <= names
    for values in ({}, {"sync": {"schedule": "time", "time_s": 60.0}}):
        config = RunConfig.from_mapping({"name": "run", **values})
        told = leaving(replace(status(), settings=settings_of(config)), "peer", AT)
        assert not [text for entry in told for text in entry.as_json().values() if re.search(r"as \w+\.\w+ says", text)]


@pytest.mark.parametrize(("asked", "words"), [(False, "if its site gave one"), (True, "needed here")])
def test_a_consent_is_told_and_whether_the_run_asks_for_it(asked: bool, words: str) -> None:
    told = by_what(leaving(configured(None, membership__consent=asked), "peer", AT), "its site's consent")
    assert words in told.what and "until the coordinator stops" in told.kept
    kept = by_what(leaving(configured(audit__enabled=True), "peer", AT), "its site's consent").kept
    assert "audit log" in kept


def test_what_a_site_does_to_what_it_sends_is_told() -> None:
    told = leaving(configured(), "peer", AT, clip=1.5, hidden=("loss", "step_s"), gb=50.0)
    size = by_what(told, "contributions").size
    assert size.endswith("; at most 50 GB on a day (limits.max_gb_per_day)")
    assert "shortened to a norm of at most 1.5 (protect.clip)" in by_what(told, "contributions").what
    assert "all without loss, step_s (protect.hide)" in by_what(told, "reports").what
    plain = leaving(configured(), "peer", AT)
    assert not any("protect" in entry.what for entry in plain)


def test_kept_contributions_are_also_the_auditors_to_see() -> None:
    kept = by_what(leaving(configured(audit__keep_contributions=4), "peer", AT), "contributions").seen_by
    assert kept.startswith("the operator of each aggregator, and the auditors that it has invited (audit.keep_contributions); ")
    assert "auditors" not in by_what(leaving(configured(), "peer", AT), "contributions").seen_by


def test_who_may_approve_changes_is_told_what_an_approval_is() -> None:
    for role in ("peer", "observer"):
        told = leaving(configured(governance__approvers=["ann"]), role, AT)
        assert "digests of both, its certificate and a signature" in by_what(told, "where it is one of governance.app").what
        plain = leaving(configured(governance__approvers=[]), role, AT)
        assert not any("governance" in each.what for each in plain)
