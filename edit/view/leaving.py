"""What is said of one kind of thing that leaves a site, in the words that runs with a coordinator and swarms have in common."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass

from edit.plain_text import parse_json, printable
from edit.view.units import bytes_text
from editpb.run_status import RunStatus

__all__ = ["Leaving", "coded", "exchanges", "measured_size", "noise", "reported", "said", "settings_of"]

_DAY_S = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """One kind of thing that leaves the site. All in words."""

    what: str
    to: str
    form: str
    how_often: str
    size: str
    seen_by: str
    kept: str

    @property
    def about(self) -> tuple[tuple[str, str], ...]:
        """What is said of it: a heading, and the words."""
        return (
            ("to", self.to),
            ("form", self.form),
            ("how often", self.how_often),
            ("size", self.size),
            ("seen by", self.seen_by),
            ("kept", self.kept),
        )

    def as_json(self) -> dict[str, str]:
        """Return one entry of `explain --json`."""
        return asdict(self)


def settings_of(status: RunStatus) -> dict[str, object]:
    """Return the run's settings by name; without those whose value is no JSON."""
    settings = {}
    for setting in status.settings:
        try:
            settings[setting.name] = parse_json(setting.value)
        except ValueError:
            continue
    return settings


def said(settings: Mapping[str, object], name: str) -> str:
    """Return a setting's value, and its name."""
    return f"{printable(str(settings[name]))} ({name})" if name in settings else f"({name})"


def coded(settings: Mapping[str, object]) -> str:
    """Return how a contribution is encoded."""
    fragments = any(value for name, value in settings.items() if name.startswith("codec.fragments"))
    return f"codec {said(settings, 'codec.up')}{', other codecs for some fragments' if fragments else ''}"


def exchanges(settings: Mapping[str, object]) -> str:
    """Return how often a peer contributes."""
    if settings.get("sync.schedule") == "time":
        return f"each fragment once in {said(settings, 'sync.time_s')} seconds"
    often = f"each fragment once in {said(settings, 'sync.every')} inner steps"
    if settings.get("sync.milestones"):
        often += f", and other numbers from later outer steps on: {said(settings, 'sync.milestones')}"
    return often


def noise(status: RunStatus, settings: Mapping[str, object]) -> str:
    """Return what a contribution that is not masked can tell of the data."""
    if settings.get("privacy.level") == "organisation":
        spent = f" (so far eps {status.epsilon:.4g})" if status.epsilon is not None else ""
        return (
            f" and without noise, so the operator can learn something about the data; the coordinator shortens it to at most "
            f"{said(settings, 'privacy.clip')} and adds noise before anybody else sees the result: about all data of one "
            f"organisation the result tells no more than eps {said(settings, 'privacy.epsilon_max')} at delta "
            f"{said(settings, 'privacy.delta')} allows{spent}"
        )
    if settings.get("privacy.level") != "example":
        return " and without noise, so whoever reads it can learn something about the data"
    return (
        f"; computed from gradients with noise: about one {said(settings, 'privacy.unit')} of the data it tells no more than "
        f"eps {said(settings, 'privacy.epsilon_max')} at delta {said(settings, 'privacy.delta')} allows, to anybody"
    )


def reported(settings: Mapping[str, object], hidden: Collection[str]) -> str:
    """Return what a peer reports of itself. hidden: protect.hide of the site's policy.toml."""
    private = settings.get("privacy.level") == "example"
    return (
        "reports: state, steps, tokens per second, bytes, the device's name, digest of the parameters; "
        + (
            "epsilon, and no training loss (privacy.level = example)"
            if private
            else "training loss, unless it runs with --hide-loss"
        )
        + "; metrics that its own loop gives to worker.report"
        + (f"; all without {', '.join(hidden)} (protect.hide)" if hidden else "")
    )


def measured_size(status: RunStatus) -> str:
    """Return the bytes of a contribution, measured over the committed rounds that the status has."""
    committed = [report for report in status.rounds if report.committed]
    arrived = sum(1 for report in committed for peer in report.peers if peer.verdict not in ("absent", "carried"))
    received = sum(report.bytes_in for report in committed)
    if not arrived or received <= 0:
        return "not known before the first committed round"
    each = received / arrived
    told = f"{bytes_text(each)} per outer step, the mean of all peers in {len(committed)} committed rounds"
    took = committed[-1].t - committed[0].t
    if len(committed) > 1 and took > 0:
        told += f"; {bytes_text(each * (len(committed) - 1) / took * _DAY_S)} per day at their pace"
    return told
