"""When a peer of which nothing comes is waited for no longer, and when again."""

from __future__ import annotations

from edit.rounds.absences import Absences

READY = {"a", "b", "idle"}


def test_two_absences_in_a_row_make_a_peer_optional_and_a_contribution_ends_that() -> None:
    absences = Absences()
    absences.missed("idle")
    assert "idle" in absences and not absences.optional("idle")
    absences.contributed("idle")
    absences.missed("idle")
    assert not absences.optional("idle"), "not in a row"
    absences.missed("idle")
    assert absences.optional("idle") and absences.awaited(READY, 2) == {"a", "b"}
    absences.contributed("idle")
    assert "idle" not in absences and absences.awaited(READY, 2) == READY


def test_an_optional_peer_is_tried_again_ever_more_rarely() -> None:
    absences, tried = Absences(), []
    absences.missed("idle")
    absences.missed("idle")
    for number in range(1, 60):
        if "idle" in absences.awaited(READY, 1):
            tried.append(number)
            absences.missed("idle")
    assert tried == [8, 24, 56]


def test_where_the_others_make_no_quorum_everybody_is_waited_for() -> None:
    absences = Absences()
    absences.missed("idle")
    absences.missed("idle")
    assert absences.awaited(READY, 3) == READY and absences.awaited(READY, 2) == {"a", "b"}
