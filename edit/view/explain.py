"""What leaves a peer's site: what it sends, to whom, in what form, how often, and where it is kept.

`leaving` is pure; `print_leaving` shows it. docs/what-leaves-my-site.md says the same for every configuration.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rich.console import Console
from rich.text import Text

from edit.plain_text import printable
from edit.view.explain_swarm import leaves_member
from edit.view.leaving import Leaving, coded, exchanges, measured_size, noise, reported, said, settings_of
from editpb.run_status import RunStatus

__all__ = ["STAYS", "TRACKERS", "Leaving", "leaving", "of_swarm", "print_leaving"]

STAYS = (
    "the training data and whatever names it",
    "the local parameters as they are (contributions say how far they moved) and the inner optimizer's state",
    "the private key of this peer's certificate",
)
TRACKERS = "A tracker (--tracker) sends what you log to where you point it: not to the run."


def of_swarm(status: RunStatus) -> bool:
    """Return whether the run has no coordinator: its council says something, or its settings have those of a swarm."""
    return status.council is not None or any(each.name.startswith("swarm.") for each in status.settings)


def leaving(
    status: RunStatus, role: str, endpoints: Sequence[str], *, clip: float = 0.0, hidden: Collection[str] = (), gb: float = 0.0
) -> tuple[Leaving, ...]:
    """Return what leaves the site of a member.

    Args:
        status: what the coordinator, or the members of a swarm, say of the run, with its settings.
        role: the member's.
        endpoints: the coordinator's, where there is one and they are known.
        clip, hidden, gb: protect.clip, protect.hide and limits.max_gb_per_day of the site's policy.toml, where that is known.
    """
    settings = settings_of(status)
    if of_swarm(status):
        return leaves_member(status, settings, role, clip=clip, hidden=hidden)
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


def _contribution(
    status: RunStatus, settings: Mapping[str, object], coordinator: str, further: Sequence[str], clip: float, gb: float
) -> Leaving:
    to = f"{coordinator} and the aggregators at {', '.join(map(printable, further))}" if further else coordinator
    masked, private = settings.get("secagg.enabled") is True, settings.get("privacy.level") == "organisation"
    others = "verdicts" if private else "norms, weights and verdicts"
    codec = coded(settings)
    if masked:
        codec = f"masked integers of {said(settings, 'secagg.bits')} bits"
    steps = settings.get("audit.keep_contributions")
    return Leaving(
        what="contributions: how far its parameters moved from the common ones (pseudo-gradients), its inner steps and tokens"
        + (", the norm of each fragment" if masked else "")
        + (f"; shortened to a norm of at most {clip:g} (protect.clip)" if clip else ""),
        to=to,
        form=f"{codec}, over mutual TLS; {_mask(settings) if masked else 'not masked' + noise(status, settings)}",
        how_often=f"{exchanges(settings)}; again when a round is aborted",
        size=measured_size(status) + (f"; at most {gb:g} GB on a day (limits.max_gb_per_day)" if gb else ""),
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
        f"of all peers is kept, in the journal and {said(settings, 'storage.keep_checkpoints')} checkpoints"
        + (f"; each as it was sent, until {steps} outer steps later (audit.keep_contributions)" if steps else ""),
    )


def _scorers(settings: Mapping[str, object]) -> str:
    return "; members of the role scorer read it, too" if settings.get("robust.trust") == "loss" else ""


def _mask(settings: Mapping[str, object]) -> str:
    """Return what hides a masked contribution."""
    return (
        f"only the sum of at least {said(settings, 'secagg.min_peers')} peers can be opened, by two thirds of the round's "
        "peers together; the operator enrols them, so run with --members (docs/secure-aggregation.md)"
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
    losses = (
        "loss and metrics: every member (membership.share_losses = true)"
        if shared
        else "loss and metrics: the operator alone (membership.share_losses = false)"
        if shared is False
        else "loss and metrics: the operator, and others if the run shares them"
    )
    return Leaving(
        what=reported(settings, hidden),
        to=coordinator,
        form="numbers and short texts, over mutual TLS",
        how_often=f"every {said(settings, 'membership.heartbeat_s')} s",
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
