"""Transcripts of the round machine: commands with times, and the effects they must have, in the style of etcd/raft.

Each file in transcripts/ begins with a comment that states its invariant. A block is commands, `----`, the expected lines, and
an empty line. After a wanted change of behaviour: `python tests/edit/rounds/test_transcripts.py` writes the lines anew;
read the diff.

    machine KEY=VALUE ...  a new machine: RoundsConfig's keys, fragments, groups, and what the machine takes
    TIME ready PEER STEP [step_s=N] TIME lost PEER REASON        TIME fault PEER REASON
    TIME offer PEER FRAGMENT        TIME arrive PEER FRAGMENT    TIME send PEER (offers and delivers all that is due)
    TIME progress PEER BYTES OF     TIME withdraw PEER           TIME phases PEER ...
    TIME reduced [FRAGMENT]         TIME committed [tokens=N]    TIME failed REASON
    TIME tick | pause | resume | drain | close REASON            TIME show
offer, arrive, send, progress, fault, reduced, committed and failed take round=N (default: the open round); offer and send
take step=N.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from edit.config.run import RoundsConfig
from edit.fragments.groups import fragments_due
from edit.rounds.events import (
    Arrived,
    Close,
    Commit,
    CommitSucceeded,
    Drain,
    Effect,
    EndRun,
    Event,
    Faulted,
    MemberLost,
    MemberReady,
    Offered,
    Pause,
    Progress,
    Quarantined,
    Reduce,
    Reduced,
    Refused,
    Resume,
    RoundClosed,
    RoundFailed,
    RoundOpened,
    RunFinished,
    Tick,
    Withdrawn,
)
from edit.rounds.machine import RoundMachine

FOLDER = Path(__file__).parent / "transcripts"
RULE = "----"
_SETTINGS = {f.name: type(f.default) for f in dataclasses.fields(RoundsConfig)}


class Transcript:
    """Runs the commands of one file against one machine."""

    def __init__(self) -> None:
        self._machine: RoundMachine | None = None
        self._fragments_due: Callable[[int], tuple[int, ...]] = lambda step: (0,)

    def run(self, command: str) -> list[str]:
        words = command.split()
        if words[0] == "machine":
            return self._build(dict(word.split("=", 1) for word in words[1:]))
        assert self._machine is not None, "the first command is machine"
        now, verb = float(words[0]), words[1]
        options = dict(word.split("=", 1) for word in words[2:] if "=" in word)
        arguments = [word for word in words[2:] if "=" not in word]
        if verb == "show":
            return [self._show()]
        if verb == "phases":
            phases = ((name, self._machine.peer_phase(name)) for name in arguments)
            return [", ".join(f"{name} {phase.value if phase else 'gone'}" for name, phase in phases)]
        effects: list[Effect] = []
        for event in self._events(verb, arguments, {key: int(value) for key, value in options.items()}):
            effects += self._machine.handle(event, now)
        return [said(effect) for effect in effects]

    def _build(self, options: dict[str, str]) -> list[str]:
        config = RoundsConfig(**{key: _SETTINGS[key](options.pop(key)) for key in list(options) if key in _SETTINGS})  # type: ignore[arg-type]
        numbers = {"fragments": 1, "groups": 1, "outer_step": 0, "outer_steps": 10, "first_round_id": 1}
        numbers |= {key: int(value) for key, value in options.items()}
        fragments, groups = numbers.pop("fragments"), numbers.pop("groups")
        self._fragments_due = lambda step: fragments_due(step, fragments, groups, "strided")
        self._machine = RoundMachine(config, due=self._fragments_due, **numbers)
        return []

    def _events(self, verb: str, arguments: list[str], options: dict[str, int]) -> Iterator[Event]:
        machine = self._machine
        assert machine is not None
        round_id = options.get("round", machine.round_id)
        step = options.get("step", machine.outer_step)
        name, rest = (arguments[0], " ".join(arguments[1:])) if arguments else ("", "")
        single: dict[str, Callable[[], Event]] = {
            "ready": lambda: MemberReady(name, int(rest), options.get("step_s", 0)),
            "lost": lambda: MemberLost(name, rest),
            "fault": lambda: Faulted(name, round_id, rest),
            "offer": lambda: Offered(name, round_id, step, int(rest)),
            "arrive": lambda: Arrived(name, round_id, int(rest)),
            "progress": lambda: Progress(name, round_id, *(int(number) for number in arguments[1:])),
            "committed": lambda: CommitSucceeded(round_id, options.get("tokens", 0)),
            "failed": lambda: RoundFailed(round_id, " ".join(arguments)),
            "withdraw": lambda: Withdrawn(name),
            "close": lambda: Close(" ".join(arguments)),
            "tick": Tick,
            "pause": Pause,
            "resume": Resume,
            "drain": lambda: Drain(options.get("to", 0)),
            "end": lambda: EndRun(" ".join(arguments)),
        }
        if verb == "send":
            for fragment_id in self._fragments_due(machine.outer_step):
                yield Offered(name, round_id, step, fragment_id)
                yield Arrived(name, round_id, fragment_id)
        elif verb == "reduced":
            for fragment_id in [int(name)] if name else self._fragments_due(machine.outer_step):
                yield Reduced(round_id, fragment_id)
        else:
            yield single[verb]()

    def _show(self) -> str:
        machine = self._machine
        assert machine is not None
        until = "-" if machine.deadline is None else f"{machine.deadline:g}"
        wakeup = machine.next_wakeup()
        return (
            f"{machine.phase.value}: step {machine.outer_step}, round {machine.round_id}, expected {names(machine.expected)}, "
            f"arrived {names(machine.arrived)}, deadline {until}, wakeup {'-' if wakeup is None else f'{wakeup:g}'}"
        )


def names(peers: Iterable[str]) -> str:
    return " ".join(sorted(peers)) or "nobody"


def said(effect: Effect) -> str:
    match effect:
        case RoundOpened():
            expected = names(effect.expected)
            return f"open round {effect.round_id} from step {effect.outer_step}: {expected}; until {effect.deadline:g}"
        case Refused():
            return f"refuse {effect.peer_id}{' (stale)' if effect.stale else ''}: {effect.reason}"
        case Quarantined():
            return f"quarantine {effect.peer_id} for {effect.seconds:g} s: {effect.reason}"
        case Reduce():
            return f"reduce fragment {effect.fragment_id} of {names(effect.peers)}"
        case Commit():
            return (
                f"commit round {effect.round_id} to step {effect.outer_step}: {effect.reason} [missing {names(effect.missing)}]"
            )
        case RoundClosed():
            word = "committed" if effect.committed else "aborted"
            carried = f" [carried {names(effect.carried)}]" if effect.carried else ""
            end = f"{effect.reason} [missing {names(effect.missing)}]{carried}"
            return f"closed round {effect.round_id}, {word} after {effect.seconds:g} s: {end}"
        case RunFinished():
            return f"finished at step {effect.outer_step}"


def replayed(text: str) -> str:
    """The same file with the lines that the machine gives now."""
    transcript, lines, pending, skipping = Transcript(), [], list[str](), False
    for line in text.splitlines():
        if line == RULE:
            lines.append(line)
            lines += [said for command in pending for said in transcript.run(command)]
            pending, skipping = [], True
        elif not line.strip():
            lines.append("")
            skipping = False
        elif not skipping:
            lines.append(line)
            pending += [] if line.startswith("#") else [line]
    assert not pending, f"commands without a {RULE}: {pending}"
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_transcript(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("# Invariant: ")
    assert replayed(text) == text


def test_every_scenario_has_a_transcript() -> None:
    assert len(list(FOLDER.glob("*.txt"))) >= 14


def test_a_transcript_can_fail() -> None:
    text = (FOLDER / "happy_path.txt").read_text()
    assert replayed(text.replace("quorum=2", "quorum=1")) != text


if __name__ == "__main__":
    for file in FOLDER.glob("*.txt"):
        file.write_text(replayed(file.read_text()))
