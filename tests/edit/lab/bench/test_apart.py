"""Processes that make a row each: what they print, what fails, and when the circumstances are taken."""

from __future__ import annotations

from typing import Any

import pytest

from edit.lab.bench import apart
from edit.lab.bench.apart import make_apart


def test_each_row_begins_with_the_circumstances_before_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    real = apart.subprocess.Popen

    def started(*words: Any, **options: Any) -> object:
        order.append("began")
        return real(*words, **options)

    def taken() -> dict[str, int]:
        order.append("taken")
        return {"load_before": len(order)}

    monkeypatch.setattr(apart, "circumstances", taken)
    monkeypatch.setattr(apart.subprocess, "Popen", started)
    found: list[object] = []
    make_apart(["1", "2"], lambda job: (("cat",), f'{{"loss": {job}}}'), 1, lambda _, row: found.append(row))
    assert order == ["taken", "began"] * 2
    assert found == [{"load_before": 1, "loss": 1}, {"load_before": 3, "loss": 2}]


def test_what_fails_is_told_and_the_others_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "circumstances", dict)
    scripts = {"fails": "echo no disk >&2; exit 3", "ends": "exit 4", "prints": "echo no row", "good": "echo '{}'"}
    found: dict[str, object] = {}
    make_apart([*scripts], lambda job: (("sh", "-c", scripts[job]), ""), 2, found.__setitem__)
    assert {job: str(row) for job, row in found.items() if job != "prints"} == {
        "fails": "no disk", "ends": "ended with 4", "good": "{}",
    }  # fmt: skip
    assert isinstance(found["prints"], ValueError)
