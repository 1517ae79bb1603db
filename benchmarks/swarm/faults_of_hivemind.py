"""How long four members that average with hivemind stand still when one is killed or stopped, and what the others then hold.

    python benchmarks/swarm/faults_of_hivemind.py --faults 20     # 2M parameters: about 15 minutes on 2 busy cores

Beside `faults.py`, with as many members, parameters and as long a wait for a silent one: here each member is a process with
hivemind's DecentralizedAverager (1.1.12, fp32), which does nothing but draw tensors anew and average them. A fault takes one of
the four, anywhere in an averaging, with all its processes.

`next`: seconds from the fault until all survivors held one mean again (64 elements compared, to 1e-3 of their spread);
`second`: until the mean after that; `never`: not within 60 s. `differ`: averagings in between that hivemind reported as a
success to a survivor though the survivors do not hold one mean after it; `failed`: that it reported as failed. hivemind has no
owner and no leader: any member is as good a victim as another.

Prints a table. Appends rows to benchmarks/results/swarm_faults.jsonl with --record. hivemind is installed from PyPI into an
environment of its own, in the user's cache folder.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from edit.lab.bench.results import Row, append_lines, circumstances, figure_note, print_table, results_table
from edit.lab.bench.rivals import environments
from edit.lab.bench.rivals.environments import HIVEMIND, Environments, cache_folder, foreign_python
from edit.lab.processes import Supervisor

MEMBER = Path(environments.__file__).with_name("hivemind_member.py")
RESULTS = Path(__file__).parents[1] / "results" / "swarm_faults.jsonl"
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
SETTLES_S, GOES_ON_S, LOOK_S, TOLERANCE = 120.0, 60.0, 0.02, 1e-3
Attempt = dict[str, Any]


class Members:
    """Processes that average, and what they have reported."""

    def __init__(self, folder: Path, python: Sequence[str], options: argparse.Namespace, supervisor: Supervisor) -> None:
        self.folder, self._python, self._options, self._supervisor = folder, python, options, supervisor
        self.names = [str(rank) for rank in range(options.members)]
        self.attempts: dict[str, list[Attempt]] = {name: [] for name in self.names}
        self._read = dict.fromkeys(self.names, 0)

    def start(self, name: str) -> None:
        options = self._options
        values = (name, options.members, options.parameters, self.folder, options.wait)
        self._supervisor.start(name, [*self._python, str(MEMBER), *map(str, values)])

    def signal(self, name: str, number: signal.Signals) -> None:
        self._supervisor.send_signal(name, number)

    def kill(self, name: str) -> None:
        self._supervisor.kill(name)
        (self.folder / f"{name}.peer").unlink(missing_ok=True)

    def look(self) -> None:
        for name in self.names:
            file = self.folder / f"{name}.jsonl"
            if file.exists():
                with file.open("rb") as lines:
                    lines.seek(self._read[name])
                    data = lines.read()
                whole = data[: data.rfind(b"\n") + 1]
                self._read[name] += len(whole)
                self.attempts[name] += map(json.loads, whole.splitlines())

    def agreed(self, names: Sequence[str], after: float) -> list[float]:
        """Return when all of these held one mean, of what ended after this moment."""
        self.look()
        found = []
        for one in later(self.attempts[names[0]], after):
            same = [next((each for each in later(self.attempts[name], after) if same_mean(one, each)), None) for name in names]
            if one["group"] and all(same):
                found.append(max(each["ended"] for each in same if each is not None))
        return found

    def wait(self, names: Sequence[str], after: float, count: int, within_s: float) -> list[float]:
        """Wait until they held so many common means, or for `within_s`; return when."""
        give_up = time.monotonic() + within_s
        while len(found := self.agreed(names, after)) < count:
            if time.monotonic() > give_up:
                break
            time.sleep(LOOK_S)
        return found


def later(attempts: Sequence[Attempt], after: float) -> list[Attempt]:
    return [each for each in attempts[-40:] if each["ended"] > after]


def same_mean(one: Attempt, other: Attempt) -> bool:
    pairs = zip(one["shown"], other["shown"], strict=True)
    return bool(other["group"]) and max(abs(a - b) for a, b in pairs) < TOLERANCE * statistics.pstdev(one["shown"])


def fault(members: Members, how: str, draw: random.Random, options: argparse.Namespace) -> Row:
    """Take one member, measure, and bring it back."""
    if len(members.wait(members.names, time.monotonic(), 3, SETTLES_S)) < 3:
        groups = {name: [each["group"] or each["failed"] for each in members.attempts[name][-4:]] for name in members.names}
        print(f"within {SETTLES_S:g} s they did not come together: {groups}; all are started again", flush=True)
        for name in members.names:
            members.kill(name)
        for name in members.names:
            members.start(name)
        if len(members.wait(members.names, time.monotonic(), 3, SETTLES_S)) < 3:
            sys.exit("they do not come together")
    begins = circumstances(options.label)
    recent = members.attempts[members.names[0]][-8:]
    exchange_s = statistics.median(each["ended"] - each["began"] for each in recent)
    time.sleep(draw.random() * exchange_s)
    victim = draw.choice(members.names)
    survivors = [name for name in members.names if name != victim]
    began = time.monotonic()
    members.signal(victim, SIGNALS[how])
    ends = sorted(members.wait(survivors, began, 2, GOES_ON_S))[:2]
    first = ends[0] if ends else math.inf
    between = [each for name in survivors for each in members.attempts[name] if began < each["ended"] < first]
    failed = sum(not each["group"] for each in between)
    alone = [
        each
        for each in between
        if each["group"]
        and not all(any(same_mean(each, other) for other in members.attempts[name][-40:]) for name in survivors)
    ]
    if how == "kill":
        members.kill(victim)
        members.start(victim)
    else:
        members.signal(victim, signal.SIGCONT)
    return {
        **begins,
        "how": how,
        "kind": "any",
        "victim": victim,
        "system": HIVEMIND.packages[0],
        **{name: round(end - began, 3) for name, end in zip(("next_s", "second_s"), ends, strict=False)},
        "exchange_s": round(exchange_s, 3),
        "differ": len(alone),
        "failed": failed,
        "parameters": options.parameters,
        "members": options.members,
        "wait_s": options.wait,
    }


def faults(options: argparse.Namespace) -> list[Row]:
    """Take members one after the other, killed and stopped, so many times each."""
    draw = random.Random(options.seed)
    planned = [how for how in SIGNALS for _ in range(options.faults)]
    draw.shuffle(planned)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="edit-bench-") as scratch:
        logs, folder = Path(scratch) / "logs", Path(scratch) / "members"
        logs.mkdir()
        folder.mkdir()
        with Supervisor(logs, patience_s=5.0) as supervisor:
            python = foreign_python(Environments(options.folder, supervisor, options.torch_index).python(HIVEMIND))
            members = Members(folder, python, options, supervisor)
            for name in members.names:
                members.start(name)
            for how in planned:
                row = fault(members, how, draw, options)
                rows.append(row)
                if options.record:
                    append_lines(RESULTS, [row])
                ends = ", ".join(f"{name[:-2]} {row[name]:.2f} s" for name in ("next_s", "second_s") if name in row)
                print(
                    f"{how} of {row['victim']}: {ends or 'never'}; {row['differ']} differ, {row['failed']} failed", flush=True
                )
    return rows


def table(rows: Sequence[Row]) -> None:
    """Print medians and the largest, by fault."""
    head = (
        "fault",
        "times",
        "next, median",
        "largest",
        "second, median",
        "largest",
        "an exchange",
        "never",
        "differ",
        "failed",
    )
    lines = []
    for how in dict.fromkeys(row["how"] for row in rows):
        of = [row for row in rows if row["how"] == how]

        def figure(name: str, choose: Callable[[list[float]], float], of: Sequence[Row] = of) -> str:
            values = [row[name] for row in of if name in row]
            return f"{choose(values):.2f} s" if values else ""

        ends = [figure(name, choose) for name in ("next_s", "second_s") for choose in (statistics.median, max)]
        counts = [str(sum("second_s" not in row for row in of))]
        counts += [str(sum(row[name] for row in of)) for name in ("differ", "failed")]
        lines.append((how, str(len(of)), *ends, figure("exchange_s", statistics.median), *counts))
    of_all = "{system}: {members} members, {parameters:,} parameters, fp32, waits of {wait_s:g} s".format(**rows[0])
    print_table(results_table(of_all, head, lines, figure_note(rows)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=1, metavar="N", help="killed, and as many stopped")
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--parameters", type=int, default=2_097_152)
    parser.add_argument("--wait", type=float, default=1.5, metavar="SECONDS", help="that hivemind waits for a silent member")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=cache_folder(), help="for the environment of hivemind")
    parser.add_argument("--torch-index", default="", help="a further index that has torch for the CPU")
    parser.add_argument("--label", default="", help="of the rows")
    parser.add_argument("--record", action="store_true", help=f"append the rows to {RESULTS.name}")
    options = parser.parse_args()
    table(faults(options))


if __name__ == "__main__":
    main()
