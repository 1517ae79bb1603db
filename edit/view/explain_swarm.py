"""What leaves the site of a member of a swarm: as a peer that trains, and as one that holds the model for all, and may own it.

There is no coordinator. Who owns a part of the model is what a coordinator is elsewhere, for that part, and any member that
others reach may become one; so what an owner reads, every member may come to read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from edit.plain_text import printable
from edit.view.leaving import Leaving, coded, exchanges, measured_size, noise, reported, said
from editpb.run_status import RunStatus

__all__ = ["leaves_member"]

_FOLDER = "in the folder of every member, for as long as that exists"


def leaves_member(
    status: RunStatus, settings: Mapping[str, object], role: str, *, clip: float = 0.0, hidden: Collection[str] = ()
) -> tuple[Leaving, ...]:
    """Return what leaves the site of a member, or of an observer. The arguments are those of `explain.leaving`."""
    if role != "peer":
        return (_observes(),)
    swaps = settings.get("outer.algorithm") == "gossip"
    audited, verifiers = settings.get("audit.enabled") is True, _verifiers(settings)
    owners = _owners(status)
    return (
        *(
            (_swap(status, settings), _settling(settings))
            if swaps
            else (_contribution(status, settings, owners, clip), _reports(settings, owners, hidden), _consent(settings, owners))
        ),
        *((_signatures(settings, owners),) if audited or verifiers else ()),
        *((_entries(),) if audited else ()),
        _model(settings, swaps=swaps),
        _council(settings),
        _standing(settings, swaps=swaps),
        *((_announcement(),) if settings.get("swarm.discovery") != "addresses" else ()),
        _authority(),
        _certificate(),
        _relayed(),
    )


def _verifiers(settings: Mapping[str, object]) -> int:
    found = settings.get("swarm.verify")
    return found if isinstance(found, int) else 0


def _owners(status: RunStatus) -> str:
    """Return who contributions go to, with the names of now where they are known."""
    parts: dict[str, list[str]] = {}
    for part in status.council.parts if status.council is not None else ():
        parts.setdefault(part.owner, []).append(str(part.part))
    now = ", ".join(
        f"{printable(owner)} (part{'s' if len(owned) > 1 else ''} {', '.join(owned)})" for owner, owned in parts.items()
    )
    return f"the owner of each part of the model{f', now {now}' if now else ''}; any member that others reach may become one"


def _contribution(status: RunStatus, settings: Mapping[str, object], owners: str, clip: float) -> Leaving:
    verifiers = _verifiers(settings)
    verified = f"; from the owner also to {verifiers} more, which merge it once more (swarm.verify)" if verifiers else ""
    steps = settings.get("audit.keep_contributions")
    more = "; members also see its inner steps and tokens (audit.enabled)" if settings.get("audit.enabled") is True else ""
    return Leaving(
        what="contributions, if it trains: how far its parameters moved from the common ones (pseudo-gradients), its inner "
        "steps and tokens" + (f"; shortened to a norm of at most {clip:g} (protect.clip)" if clip else ""),
        to=f"{owners}{verified}. To a part that it owns itself it contributes on its own machine",
        form=f"{coded(settings)}, over mutual TLS; not masked{noise(status, settings)}",
        how_often=f"{exchanges(settings)}; again when a round is aborted or the part gets another owner",
        size=measured_size(status),
        seen_by="the operators of these members, so in the course of time of any member; all members and observers see norms, "
        f"weights, verdicts and the merged result{more}",
        kept="at the owner"
        + (" and those who verify" if verifiers else "")
        + ", in memory or in a file beside it, until its round is closed or it is merged later; then only the merged result of "
        f"all peers is kept, in the journal and {said(settings, 'storage.keep_checkpoints')} checkpoints of every member"
        + (f"; at the owner each as it was sent, until {steps} outer steps later (audit.keep_contributions)" if steps else ""),
    )


def _swap(status: RunStatus, settings: Mapping[str, object]) -> Leaving:
    return Leaving(
        what="swaps, if it trains: how far its parameters moved from its outer ones (pseudo-gradients), its inner steps and "
        "tokens, and its outer parameters",
        to="one other member that trains, drawn anew for each outer step; its reports stay at this site",
        form=f"{coded(settings)}, the outer parameters in codec {said(settings, 'gossip.codec')}, over mutual TLS; not masked"
        f"{noise(status, settings)}",
        how_often=f"{exchanges(settings)}; again when the connection breaks",
        size="the whole model in both codecs",
        seen_by="the operator of that member, so in the course of time of any member that trains",
        kept="in memory until the swap is over; then only what came of both, and norms, at each of the two",
    )


def _settling(settings: Mapping[str, object]) -> Leaving:
    return Leaving(
        what="its outer parameters, if it trains",
        to="the member that carries out a settling; a member that was away or is new, and begins where this one is",
        form="plain fp32, over mutual TLS",
        how_often=f"every {said(settings, 'gossip.settle_every')} outer steps (0: never before the end), and at the end; "
        "when a member asks",
        size="4 bytes for each parameter",
        seen_by="the operators of these members; every member gets the mean of all",
        kept="in memory until all have settled; by a member that begins there, as its own outer parameters",
    )


def _signatures(settings: Mapping[str, object], owners: str) -> Leaving:
    audited = settings.get("audit.enabled") is True
    return Leaving(
        what="a signature of each contribution, with the key of its certificate, the hash of the bytes, inner steps and tokens",
        to=owners + ("; with the entries of the audit log to every member" if audited else "; from there to those who verify"),
        form="P-256 and BLAKE3, over mutual TLS",
        how_often=f"with each contribution ({'audit.enabled' if audited else 'swarm.verify'})",
        size="about 300 bytes for each fragment",
        seen_by="every member, and whoever gets an audit log or a copy of it" if audited else "the operators of these members",
        kept="in the audit log of every member, which is not shortened; the contribution itself is not in it"
        if audited
        else "with the contribution, until its round is closed",
    )


def _reports(settings: Mapping[str, object], owners: str, hidden: Collection[str]) -> Leaving:
    shared = settings.get("membership.share_losses")
    those = "the operators of the owners, and whoever has the authority's key"
    losses = (
        "loss and metrics: every member and observer (membership.share_losses = true)"
        if shared
        else f"loss and metrics: {those} (membership.share_losses = false)"
        if shared is False
        else f"loss and metrics: {those}, and others if the run shares them"
    )
    return Leaving(
        what=f"{reported(settings, hidden)}. Only if it trains",
        to=owners,
        form="numbers and short texts, over mutual TLS",
        how_often=f"every {said(settings, 'membership.heartbeat_s')} s to each owner",
        size="below 1 kB each, plus metrics",
        seen_by=f"every member and observer; {losses}",
        kept="at each owner in metrics.jsonl and the three files before it, until newer lines take their place",
    )


def _consent(settings: Mapping[str, object], owners: str) -> Leaving:
    needed = "needed here" if settings.get("membership.consent") is True else "if its site gave one"
    audited = settings.get("audit.enabled") is True
    return Leaving(
        what=f"its site's consent, if it trains ({needed}): digests of the configuration and of policy.toml, what that says of "
        "the data, and a signature of them",
        to=owners + ("; with the entries of the audit log to every member" if audited else ""),
        form="SHA-256 and P-256, over mutual TLS",
        how_often="with every connection to an owner",
        size="about 300 bytes",
        seen_by="every member, and whoever gets an audit log or a copy of it"
        if audited
        else "the operators of these members; that there is one: every member",
        kept="in the audit log of every member, which is not shortened"
        if audited
        else "in memory, until the owner has the part no more",
    )


def _entries() -> Leaving:
    return Leaving(
        what="as the owner of a part, the entry of each outer step in the audit log, signed: who contributed, with which key, "
        "hash, signature, norm, weight and verdict, and what came of it; to peers also hashes which show that a log goes on "
        "from what they have seen of it",
        to="every member, with the update",
        form="JSON, P-256 and BLAKE3, over mutual TLS",
        how_often="once for each outer step of a part that it owns (audit.enabled)",
        size="about 300 bytes for each peer and fragment",
        seen_by="every member, and whoever gets an audit log or a copy of it (edit-peer swarm audit export)",
        kept="in the audit log of every member, which is not shortened",
    )


def _model(settings: Mapping[str, object], *, swaps: bool) -> Leaving:
    own = "the model of the last settling" if swaps else "the common outer parameters"
    return Leaving(
        what="the model, which it holds for all: updates, with names, norms, weights and verdicts of their contributors; "
        f"whole states ({own}, the outer optimizer's state, the statistics of earlier contributions); the run's settings, and "
        "names and shapes of the parameters. So the founder also sends the first parameters",
        to="every other member: the updates that it makes as the owner of a part; those that lack something: whatever it holds",
        form=("" if swaps else f"updates in codec {said(settings, 'codec.down')}, states in ") + "plain fp32, over mutual TLS",
        how_often=f"an update with each {'settling' if swaps else 'outer step'}; "
        "a state when a member joins, was away for long or has damaged files",
        size="an update once for each other member; of a state 4 bytes for each parameter, and 4 more for each number that the "
        "outer optimizer keeps of it",
        seen_by="every member; observers see names, norms, weights and verdicts, and the settings",
        kept=f"in the journal and {said(settings, 'storage.keep_checkpoints')} checkpoints of every member",
    )


def _council(settings: Mapping[str, object]) -> Leaving:
    return Leaving(
        what="what members agree on (the council): votes, who leads and owns what, names and addresses of members, hashes of "
        "their keys, which outer step of each part it has, digests, and complaints about an owner",
        to="every other member",
        form="numbers and short texts, over mutual TLS",
        how_often=f"every {said(settings, 'swarm.heartbeat_s')} s, and whenever something changes",
        size="below 1 kB each; a few kB when the record of it changed",
        seen_by="every member; observers see it, too",
        kept=f"the newest record: in council.json, {_FOLDER}",
    )


def _standing(settings: Mapping[str, object], *, swaps: bool) -> Leaving:
    losses = "" if settings.get("membership.share_losses") is True else " without losses"
    rounds = "its outer steps, its last partner and how far apart the two were" if swaps else "the rounds of parts that it owns"
    return Leaving(
        what="how its host stands: that record, which members it is connected to and why not to others, what it fetches, "
        f"{rounds}, and the last things that it noticed",
        to="members and observers that ask (status, watch, web, report); with --metrics-listen, as numbers"
        f"{losses}, whoever reaches that address",
        form="JSON over mutual TLS; --metrics-listen is plain HTTP without a password",
        how_often="when somebody asks: a screen or a page about every second",
        size="some kB",
        seen_by="who asked",
        kept="not by the run; a report is a file of who wrote it",
    )


def _announcement() -> Leaving:
    return Leaving(
        what="where its host is, if hivemind is installed here and others can reach it: its addresses, its certificate, whom "
        "it takes for the leader, and which version of the record it has; signed",
        to="the nodes of a DHT (swarm.discovery), of members and of others that take part in it",
        form="msgpack with a P-256 signature, over libp2p",
        how_often="every 20 s",
        size="about 1 kB, to several nodes",
        seen_by="whoever reaches a node of that DHT, members or not",
        kept="in memory of those nodes, for 60 s",
    )


def _authority() -> Leaving:
    return Leaving(
        what="only from a member with the authority's key: certificates of others; a copy of that key, if its operator calls "
        "share-authority",
        to="who redeems an invitation or has its certificate renewed; the member that the operator names",
        form="X.509 and PEM, over TLS",
        how_often="when somebody joins, once in some months for each member, and with share-authority",
        size="about 1 kB",
        seen_by="that member; every member knows who was enrolled and who has the key",
        kept="in that member's folder",
    )


def _certificate() -> Leaving:
    return Leaving(
        what="its certificate and the address that it connects from; once, as it joins, its invitation and its public key",
        to="the members that it connects to, and those that connect to it",
        form="mutual TLS",
        how_often="with every connection",
        size="a few kB",
        seen_by="the operators of these members; its name, state and advertised address: every member",
        kept=f"certificate, name, advertised address and the key's hash {_FOLDER}; other addresses at most in their logs",
    )


def _relayed() -> Leaving:
    return Leaving(
        what="all of this once more where it, or whom it connects to, is reached by a relay (--relay)",
        to="that relay, which passes it on",
        form="encrypted from member to member (TLS): the relay has no key to it",
        how_often="with every such connection",
        size="the bytes that pass",
        seen_by="the relay's operator sees who is connected, from which address, when, and how many bytes pass",
        kept="no bytes; who was connected, and from where, in the relay's log",
    )


def _observes() -> Leaving:
    return Leaving(
        what="its certificate, the address that it connects from, and its questions how the run stands; once, as it joins, its "
        "invitation and its public key",
        to="the members that it asks; by a relay, where they are reached by one",
        form="mutual TLS, also through a relay",
        how_often="with every connection",
        size="a few kB",
        seen_by="the operators of these members; its name: every member",
        kept=f"its name and its key's hash {_FOLDER}; its address at most in their logs",
    )
