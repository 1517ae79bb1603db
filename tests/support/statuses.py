"""Statuses of a run with a straggler, a peer whose contribution is rejected, and one that is lost; drawn from a seed."""

from __future__ import annotations

import math
import random
from dataclasses import replace

from edit.records import FragmentCommit, PeerVerdict, Verdict
from editpb.run_status import (
    CouncilMember,
    CouncilPart,
    CouncilStatus,
    Curve,
    Event,
    MemberStatus,
    RoundReport,
    RunStatus,
    Setting,
)

T = 1_795_300_000.0  # unix seconds: when these statuses are said
PEERS = ("aurora", "basel", "cambridge", "delft", "espoo")
HOSTILE = '<img src=x onerror="alert(1)">\'"&\u202eevil</script><script>alert(2)</script>'
WORSE = {("delft", 17): Verdict.NONFINITE, ("delft", 18): Verdict.NONFINITE, ("basel", 9): Verdict.ANOMALOUS}
LOST_AT = 26  # espoo's last outer step
ROUND_S = 41.0


def busy_run(outer_step: int = 34, outer_steps: int = 60, seed: int = 0) -> RunStatus:
    """A run in which delft was rejected, cambridge straggles and espoo was lost."""
    draw = random.Random(seed)
    rounds = tuple(_round(step, draw) for step in range(1, outer_step + 1))
    return RunStatus(
        run_id="ocean-5f3a91c2",
        phase="collecting",
        outer_step=outer_step,
        outer_steps=outer_steps,
        round_id=rounds[-1].round_id + 1,
        reason="",
        waiting_for="cambridge (3 in, quorum 3)",
        draining=False,
        tokens=outer_step * 5 * 131_072,
        stop_tokens=0,
        digest="8c1f" * 16,
        parameters=124_439_808,
        peak_memory_bytes=1_400_000_000,
        expected=PEERS[:4],
        arrived=("aurora", "basel", "delft"),
        deadline_in_s=31.0,
        members=_members(outer_step, draw),
        rounds=rounds,
        warnings=("cambridge takes 1.6 times as long as the others; more inner steps for the others would use the wait",),
        t=T,
        eta_s=(outer_steps - outer_step) * ROUND_S,
        curves=_curves(outer_step, draw),
        events=_events(outer_step),
        settings=(
            Setting(name="sync.every", value="200", default="100"),
            Setting(name="codec.up", value='"int4"', default='"int8"'),
            Setting(name="rounds.quorum", value="3", default="1"),
            Setting(name="rounds.start_peers", value="5", default="1"),
            Setting(name="outer.lr", value="0.7", default="0.7"),
            Setting(name="outer.momentum", value="0.9", default="0.9"),
            Setting(name="membership.share_losses", value="false", default="false"),
        ),
    )


def finished_run() -> RunStatus:
    """The same run at its end, with espoo back."""
    status = busy_run(60, 60)
    members = tuple(
        replace(one, state="left", reason="the run is finished") if one.role == "peer" else one for one in status.members
    )
    return replace(
        status, phase="finished", waiting_for="", members=members, warnings=(), eta_s=None, round_id=0, expected=(), arrived=()
    )


def hostile_run() -> RunStatus:
    """A run in which every text of others is markup."""
    status = busy_run(3)
    member = replace(status.members[0], peer_id=HOSTILE, device=HOSTILE, verdict=HOSTILE, verdict_reason=HOSTILE)
    lost = replace(member, state=HOSTILE, reason=HOSTILE, role=HOSTILE)
    report = replace(
        status.rounds[-1], round_id=4, committed=False, fragments=(), reason=HOSTILE, missing=(HOSTILE,), carried=(HOSTILE,)
    )
    return replace(
        status,
        run_id=HOSTILE,
        waiting_for=HOSTILE,
        reason=HOSTILE,
        warnings=(HOSTILE,),
        members=(member, lost),
        rounds=(*status.rounds, report),
        curves=tuple(replace(one, peer_id=HOSTILE) for one in status.curves if one.kind == "loss")[:1],
        events=(Event(number=1, t=T, kind=HOSTILE, peer_id=HOSTILE, text=HOSTILE, tone=HOSTILE),),
        settings=(Setting(name=HOSTILE, value=HOSTILE, default=""),),
        council=CouncilStatus(
            leader=HOSTILE,
            quorum=HOSTILE,
            lost=True,
            term=1,
            version=1,
            parts=(CouncilPart(part=0, owner=HOSTILE, outer_step=1, held_by=1, waiting_for=HOSTILE),),
            members=(CouncilMember(peer_id=HOSTILE, votes=True, state=HOSTILE, owns=(0,), why=HOSTILE),),
            notes=(HOSTILE,),
        ),
    )


def _here(peer_id: str, step: int) -> bool:
    return peer_id != "espoo" or step <= LOST_AT


def _round(step: int, draw: random.Random) -> RoundReport:
    here = [name for name in PEERS if _here(name, step)]
    fragments = []
    for fragment_id in range(3):
        verdicts = [WORSE.get((name, step), Verdict.OK) for name in here]
        raw = [draw.uniform(0.8, 1.2) if verdict is Verdict.OK else 0.0 for verdict in verdicts]
        norms = {Verdict.OK: 1.0, Verdict.NONFINITE: math.nan, Verdict.ANOMALOUS: 14.0}
        fragments.append(
            FragmentCommit(
                fragment_id=fragment_id,
                payload=None,
                verdicts=tuple(
                    PeerVerdict(
                        peer_id=name,
                        verdict=verdict,
                        norm=norms[verdict] * draw.uniform(0.9, 1.1) * 2.4 / math.sqrt(step + 2),
                        weight=part / sum(raw),
                    )
                    for name, verdict, part in zip(here, verdicts, raw, strict=True)
                ),
                merged_norm=1.9 / math.sqrt(step + 2),
                clip=1.0,
            )
        )
    late = "cambridge" if step in (21, 29) else None
    if late:
        fragments = [replace(each, verdicts=tuple(v for v in each.verdicts if v.peer_id != late)) for each in fragments]
    return RoundReport(
        round_id=step,
        outer_step=step,
        committed=True,
        reason=f"the deadline of {late} is over" if late else "all that were expected are in",
        seconds=ROUND_S * draw.uniform(0.9, 1.1),
        bytes_in=int(len(here) * 62e6),
        bytes_out=int(62e6),
        missing=tuple(name for name in PEERS if step == LOST_AT + 1 and name == "espoo"),
        digest=f"{step:08x}" * 8,
        fragments=tuple(fragments),
        carried=(late,) if late else (),
        t=T - (34 - step) * ROUND_S,
    )


def _members(outer_step: int, draw: random.Random) -> tuple[MemberStatus, ...]:
    rows = []
    devices = ("8 x H100", "4 x A100", "RTX 4090", "8 x MI300X", "TPU host, cpu")
    for place, name in enumerate(PEERS):
        speed = (31_000.0, 27_500.0, 12_400.0, 30_100.0, 26_000.0)[place]
        waiting = (0.22, 0.2, 0.01, 0.21, 0.2)[place]
        away = name == "espoo"
        rows.append(
            MemberStatus(
                peer_id=name,
                role="peer",
                state="lost" if away else "training" if name == "cambridge" else "exchanging",
                reason="no sign of life for 30 s" if away else "",
                silent_s=330.0 if away else 0.6,
                outer_step=LOST_AT if away else outer_step,
                inner_steps=outer_step * 200,
                loss=4.1 * math.exp(-outer_step / 40) + 2.4 + draw.uniform(-0.05, 0.05),
                tokens_per_s=speed,
                step_s=0.2,
                bytes_sent=int(outer_step * 62e6),
                bytes_received=int(outer_step * 62e6),
                contributions=outer_step - (2 if name == "delft" else 0),
                rejections={"delft": 2, "basel": 1}.get(name, 0),
                absences=1 if away else 0,
                phase="" if away else "compute" if name == "cambridge" else "waiting",
                optional=name == "cambridge",
                expires=T + (2.1 * 86_400 if name == "basel" else 61 * 86_400),
                device=devices[place],
                computing=0.9 - waiting,
                exchanging=0.1,
                waiting=waiting,
                verdict="absent" if away else "ok",
                verdict_reason="its contribution did not come in time" if away else "merged",
            )
        )
    rows.append(
        MemberStatus(
            peer_id="ada",
            role="observer",
            state="invited",
            reason="has not attended since the coordinator started",
            expires=T + 20 * 86_400,
        )
    )
    return tuple(rows)


def _curves(outer_step: int, draw: random.Random) -> tuple[Curve, ...]:
    curves = []
    for place, name in enumerate(PEERS):
        last = min(outer_step, LOST_AT) if name == "espoo" else outer_step
        x = [float(10 * n) for n in range(1, last * 20 + 1)]
        y = [4.1 * math.exp(-each / 8000) + 2.4 + 0.05 * place + draw.gauss(0, 0.03) for each in x]
        curves.append(Curve(kind="loss", peer_id=name, x=tuple(x), t=tuple(T + each for each in x), y=tuple(y)))
    steps = tuple(float(step) for step in range(1, outer_step + 1))
    times = tuple(T - (outer_step - step) * ROUND_S for step in steps)

    def of_run(kind: str, value: float, half: float) -> Curve:
        return Curve(kind=kind, x=steps, t=times, y=tuple(value + draw.uniform(-half, half) for _ in steps))

    for name in PEERS:
        here = [step for step in steps if _here(name, int(step)) and (name, int(step)) not in WORSE]
        norms = tuple(4.1 / math.sqrt(step + 2) * draw.uniform(0.92, 1.08) for step in here)
        curves.append(Curve(kind="norm", peer_id=name, x=tuple(here), t=tuple(T for _ in here), y=norms))
    held_out = tuple(4.3 * math.exp(-step * 200 / 8500) + 2.5 for step in steps)
    return (
        *curves,
        Curve(kind="held_out", x=steps, t=times, y=held_out),
        of_run("cosine", 0.62, 0.04),
        of_run("round_s", ROUND_S, 4.0),
        Curve(kind="bytes_in", x=steps, t=times, y=tuple(step * 4.6 * 62e6 for step in steps)),
        Curve(kind="bytes_out", x=steps, t=times, y=tuple(step * 62e6 for step in steps)),
        *_shares(steps, times, draw),
    )


def _shares(steps: tuple[float, ...], times: tuple[float, ...], draw: random.Random) -> tuple[Curve, ...]:
    waiting = [0.16 + draw.uniform(-0.03, 0.03) for _ in steps]
    shares = {"computing": [0.9 - each for each in waiting], "exchanging": [0.1 for _ in steps], "waiting": waiting}
    return tuple(Curve(kind=kind, x=steps, t=times, y=tuple(y)) for kind, y in shares.items())


def _events(outer_step: int) -> tuple[Event, ...]:
    told = [
        (-1400, "run", "", "aurora founded the run: 124439808 parameters in 3 fragments", "info"),
        (-1030, "rejected", "basel", "basel: rejected at outer step 9: norm 14 times that of the others", "fault"),
        (-700, "rejected", "delft", "delft: rejected at outer step 17: NaN or infinite values", "bad"),
        (-660, "rejected", "delft", "delft: rejected at outer step 18: NaN or infinite values", "bad"),
        (-600, "member", "delft", "delft: its contributions are merged again", "good"),
        (-330, "member", "espoo", "espoo: lost (no sign of life for 30 s)", "bad"),
        (-200, "round", "cambridge", "round 29: cambridge is carried into the next round", "fault"),
        (-41, "round", "", f"round {outer_step} committed: all that were expected are in (40.10 s)", "info"),
    ]
    return tuple(
        Event(number=number, t=T + at, kind=kind, peer_id=peer, text=text, tone=tone)
        for number, (at, kind, peer, text, tone) in enumerate(told, 1)
    )
