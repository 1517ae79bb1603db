"""What leaves a peer's site: what it sends, to whom, in what form, how often, and where it is kept.

`leaving` is pure; `print_leaving` shows it. docs/what-leaves-my-site.md says the same for every configuration.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.text import Text

from edit.plain_text import parse_json, printable
from edit.view.units import bytes_text
from editpb.run_status import RunStatus

__all__ = ["STAYS", "TRACKERS", "Leaving", "leaving", "print_leaving"]

STAYS = (
    "the training data and whatever names it",
    "the local parameters and the inner optimizer's state",
    "the private key of this peer's certificate",
)
TRACKERS = "A tracker (--tracker) sends what you log to where you point it: not to the run."
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


def leaving(
    status: RunStatus, role: str, endpoints: Sequence[str], *, clip: float = 0.0, hidden: Collection[str] = (), gb: float = 0.0
) -> tuple[Leaving, ...]:
    """Return what leaves the site of a member.

    Args:
        status: what the coordinator says of the run, with its settings.
        role: the member's.
        endpoints: the coordinator's, where they are known.
        clip, hidden, gb: protect.clip, protect.hide and limits.max_gb_per_day of the site's policy.toml, where that is known.
    """
    settings = _settings(status)
    coordinator = "the coordinator" + (f" ({' or '.join(map(printable, endpoints))})" if endpoints else "")
    asked = Leaving(
        what="its certificate and the address that it connects from",
        to=coordinator,
        form="mutual TLS",
        how_often="with every connection",
        size="a few kB",
        seen_by="the operator; its name and state: every member",
        kept="the name and events: at the coordinator, for as long as its folder; the address: in its log",
    )
    approval = (_approval(coordinator),) if settings.get("governance.approvers") else ()
    if role == "scorer":
        return (_scores(coordinator), *approval, asked)
    if role != "peer":
        return (*approval, asked)
    addresses = settings.get("aggregators.addresses")
    further = tuple(map(str, addresses)) if isinstance(addresses, list) else ()
    return (
        _contribution(status, settings, coordinator, further, clip, gb),
        *((_mask_keys(coordinator),) if settings.get("secagg.enabled") is True else ()),
        *((_signatures(coordinator),) if settings.get("audit.enabled") is True else ()),
        _heartbeat(settings, coordinator, hidden),
        _schema(coordinator),
        _consent(settings, coordinator),
        *approval,
        asked,
    )


def _scores(coordinator: str) -> Leaving:
    return Leaving(
        what="one number of each peer: by how much its contribution lowered the loss on this member's data",
        to=coordinator,
        form="numbers from -1 to 1, over mutual TLS",
        how_often="once for each outer step",
        size="about 30 bytes for each peer",
        seen_by="the operator; the resulting verdicts and weights: every member",
        kept="in the coordinator's log; with audit.enabled in the audit log, permanently",
    )


def _settings(status: RunStatus) -> dict[str, object]:
    """Return the run's settings by name; without those whose value is no JSON."""
    settings = {}
    for setting in status.settings:
        try:
            settings[setting.name] = parse_json(setting.value)
        except ValueError:
            continue
    return settings


def _contribution(
    status: RunStatus, settings: Mapping[str, object], coordinator: str, further: Sequence[str], clip: float, gb: float
) -> Leaving:
    to = f"{coordinator} and the aggregators at {', '.join(map(printable, further))}" if further else coordinator
    fragments = any(value for name, value in settings.items() if name.startswith("codec.fragments"))
    often = f"each fragment once in {_said(settings, 'sync.every')} inner steps"
    if settings.get("sync.milestones"):
        often += f", and other numbers from later outer steps on: {_said(settings, 'sync.milestones')}"
    if settings.get("sync.schedule") == "time":
        often = f"each fragment once in {_said(settings, 'sync.time_s')} seconds"
    codec = f"codec {_said(settings, 'codec.up')}{', other codecs for some fragments' if fragments else ''}"
    masked, private = settings.get("secagg.enabled") is True, settings.get("privacy.level") == "organisation"
    others = "verdicts" if private else "norms, weights and verdicts"
    if masked:
        codec = f"masked integers of {_said(settings, 'secagg.bits')} bits"
    steps = settings.get("audit.keep_contributions")
    return Leaving(
        what="contributions: how far its parameters moved from the common ones (pseudo-gradients), its inner steps and tokens"
        + (", the norm of each fragment" if masked else "")
        + (f"; shortened to a norm of at most {clip:g} (protect.clip)" if clip else ""),
        to=to,
        form=f"{codec}, over mutual TLS; {_mask(settings) if masked else 'not masked' + _noise(status, settings)}",
        how_often=f"{often}; again when a round is aborted",
        size=_size(status) + (f"; at most {gb:g} GB on a day (limits.max_gb_per_day)" if gb else ""),
        seen_by=(
            "the operator sees the norms, and the sum of all peers; other members see norms, weights and verdicts, and the "
            "merged result"
            if masked
            else "the operator of each aggregator"
            + (", and the auditors that it has invited (audit.keep_contributions)" if steps else "")
            + f"{_scorers(settings)}; other members see {others}, and the merged result"
            + (", which has noise" if private else "")
        ),
        kept="in memory, or in a file beside it, until its round is closed or it is merged later; then only the merged result "
        f"of all peers is kept, in the journal and {_said(settings, 'storage.keep_checkpoints')} checkpoints"
        + (f"; each as it was sent, until {steps} outer steps later (audit.keep_contributions)" if steps else ""),
    )


def _scorers(settings: Mapping[str, object]) -> str:
    return "; members of the role scorer read it, too" if settings.get("robust.trust") == "loss" else ""


def _mask(settings: Mapping[str, object]) -> str:
    """Return what hides a masked contribution."""
    return (
        f"only the sum of at least {_said(settings, 'secagg.min_peers')} peers can be opened, by two thirds of the round's "
        "peers together; the operator enrols them, so run with --members (docs/secure-aggregation.md)"
    )


def _spent(status: RunStatus) -> str:
    return f" (so far eps {status.epsilon:.4g})" if status.epsilon is not None else ""


def _noise(status: RunStatus, settings: Mapping[str, object]) -> str:
    """Return what the contribution can tell of the data."""
    if settings.get("privacy.level") == "organisation":
        return (
            f" and without noise, so the operator can learn something about the data; the coordinator shortens it to at most "
            f"{_said(settings, 'privacy.clip')} and adds noise before anybody else sees the result: about all data of one "
            f"organisation the result tells no more than eps {_said(settings, 'privacy.epsilon_max')} at delta "
            f"{_said(settings, 'privacy.delta')} allows{_spent(status)}"
        )
    if settings.get("privacy.level") != "example":
        return " and without noise, so whoever reads it can learn something about the data"
    return (
        f"; computed from gradients with noise: about one {_said(settings, 'privacy.unit')} of the data it tells no more than "
        f"eps {_said(settings, 'privacy.epsilon_max')} at delta {_said(settings, 'privacy.delta')} allows, to anybody"
    )


def _mask_keys(coordinator: str) -> Leaving:
    return Leaving(
        what="keys of each round: a public key, signed; shares of its secrets, each sealed for one other peer; after the "
        "round, the shares that open the sum",
        to=coordinator,
        form="X25519, AES-256-GCM, Shamir's shares; over mutual TLS",
        how_often="each round (secagg.enabled)",
        size="about 100 bytes and 200 more for each other peer",
        seen_by="the operator; a sealed share, the one peer that it is for",
        kept="in memory until the round is over",
    )


def _signatures(coordinator: str) -> Leaving:
    return Leaving(
        what="a signature of each contribution, with the key of its certificate, the hash of the bytes, inner steps, tokens "
        "and the newest head of the audit log that it has seen",
        to=coordinator,
        form="P-256 and BLAKE3, over mutual TLS",
        how_often="with each contribution (audit.enabled)",
        size="about 300 bytes for each fragment",
        seen_by="the operator, and whoever gets the audit log or a copy of it",
        kept="in the coordinator's audit log, which is not shortened; the contribution itself is not in it",
    )


def _heartbeat(settings: Mapping[str, object], coordinator: str, hidden: Collection[str]) -> Leaving:
    shared = settings.get("membership.share_losses")
    private = settings.get("privacy.level") == "example"
    losses = (
        "loss and metrics: every member (membership.share_losses = true)"
        if shared
        else "loss and metrics: the operator alone (membership.share_losses = false)"
        if shared is False
        else "loss and metrics: the operator, and others if the run shares them"
    )
    return Leaving(
        what="reports: state, steps, tokens per second, bytes, the device's name, digest of the parameters; "
        + (
            "epsilon, and no training loss (privacy.level = example)"
            if private
            else "training loss, unless it runs with --hide-loss"
        )
        + "; metrics that its own loop gives to worker.report"
        + (f"; all without {', '.join(hidden)} (protect.hide)" if hidden else ""),
        to=coordinator,
        form="numbers and short texts, over mutual TLS",
        how_often=f"every {_said(settings, 'membership.heartbeat_s')} s",
        size="below 1 kB each, plus metrics",
        seen_by=f"the operator and every member; {losses}",
        kept="in the coordinator's metrics.jsonl and the three files before it, until newer lines take their place",
    )


def _schema(coordinator: str) -> Leaving:
    return Leaving(
        what="the names and shapes of the model's parameters; from the first peer of a run, its first parameters",
        to=coordinator,
        form="plain fp32 for the parameters, over mutual TLS",
        how_often="once",
        size="the parameters: 4 bytes each",
        seen_by="the operator; every member gets the common parameters",
        kept="in the checkpoints, as the run's model",
    )


def _consent(settings: Mapping[str, object], coordinator: str) -> Leaving:
    needed = "needed here" if settings.get("membership.consent") is True else "if its site gave one"
    audit = settings.get("audit.enabled") is True
    return Leaving(
        what=f"its site's consent ({needed}): digests of the configuration and of policy.toml, what that says of the data, "
        "and a signature of them",
        to=coordinator,
        form="SHA-256 and P-256, over mutual TLS",
        how_often="with every connection",
        size="about 300 bytes",
        seen_by="the operator; that there is one: every member"
        + ("; whoever gets the audit log or a copy of it" if audit else ""),
        kept="in the coordinator's audit log, which is not shortened" if audit else "in memory, until the coordinator stops",
    )


def _approval(coordinator: str) -> Leaving:
    return Leaving(
        what="where it is one of governance.approvers: its approvals of changed configurations, with digests of both, its "
        "certificate and a signature",
        to=coordinator,
        form="SHA-256 and P-256, over mutual TLS",
        how_often="with each call of edit-peer approve that approves",
        size="about 1 kB",
        seen_by="every member, and whoever gets the audit log or a copy of it",
        kept="in the coordinator's audit log, which is not shortened",
    )


def _said(settings: Mapping[str, object], name: str) -> str:
    """Return a setting's value, and its name."""
    return f"{printable(str(settings[name]))} ({name})" if name in settings else f"({name})"


def _size(status: RunStatus) -> str:
    """Return the bytes of a contribution, measured over the committed rounds that the status has."""
    committed = [report for report in status.rounds if report.committed]
    arrived = sum(1 for report in committed for peer in report.peers if peer.verdict not in ("absent", "carried"))
    received = sum(report.bytes_in for report in committed)
    if not arrived or received <= 0:
        return "not known before the first committed round"
    each = received / arrived
    said = f"{bytes_text(each)} per outer step, the mean of all peers in {len(committed)} committed rounds"
    took = committed[-1].t - committed[0].t
    if len(committed) > 1 and took > 0:
        said += f"; {bytes_text(each * (len(committed) - 1) / took * _DAY_S)} per day at their pace"
    return said


def print_leaving(console: Console, run_id: str, peer_id: str, entries: Sequence[Leaving]) -> None:
    """Print what leaves the site, and what does not."""
    console.print(
        Text(f"What leaves the site of {printable(peer_id)} for {printable(run_id)}, as the run is configured now", "bold")
    )
    for entry in entries:
        console.print(Text(f"\n{entry.what}", "bold"), soft_wrap=True)
        for name, words in entry.about:
            console.print(Text(f"  {name:10}{words}"), soft_wrap=True)
    console.print(Text(f"\nNot sent: {'; '.join(STAYS)}."), soft_wrap=True)
    console.print(Text(TRACKERS), soft_wrap=True)
