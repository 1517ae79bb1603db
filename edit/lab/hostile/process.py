"""The process of an attacker: it changes from one behaviour to the next, drawn from a seed, until SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from edit.lab.hostile.catalogue import BEHAVIOURS, Behaviour
from edit.lab.hostile.home import HostileHome
from edit.lab.hostile.member import Attacker

__all__ = ["command", "drawn", "main"]

_NICE = 10  # an attacker has a machine of its own; here it shares one with those whom it attacks


def command(home: HostileHome, *, seed: int = 0, each_s: float = 10.0, names: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the command line of an attacker. names: of its behaviours; none: all."""
    options = ("--home", str(home.path), "--seed", str(seed), "--each", str(each_s))
    return (sys.executable, "-m", "edit.lab.hostile", *options, *(part for name in names for part in ("--only", name)))


def drawn(seed: int, names: Sequence[str]) -> Iterator[Behaviour]:
    """Yield behaviours for ever, from shuffled decks of `names`, so that each occurs once before any occurs again."""
    chance = random.Random(seed)
    while True:
        for name in chance.sample(names, len(names)):
            yield BEHAVIOURS[name]


async def _behave(home: HostileHome, seed: int, each_s: float, names: Sequence[str]) -> None:
    """Write lines of JSON: when a behaviour begins; and, when it is over, its seconds and how often each answer came."""
    chance = random.Random(seed)
    for behaviour in drawn(seed, names):
        attacker, began = Attacker(home, random.Random(chance.random())), time.time()
        print(json.dumps({"kind": "begins", "t": round(began, 3), "name": behaviour.name}), flush=True)  # noqa: T201
        tally = await _for_a_while(behaviour, attacker, each_s)
        line = {"kind": "behaviour", "t": round(began, 3), "name": behaviour.name, "s": round(time.time() - began, 1)}
        print(json.dumps({**line, "answers": dict(tally)}), flush=True)  # noqa: T201


async def _for_a_while(behaviour: Behaviour, attacker: Attacker, each_s: float) -> Counter[str]:
    """Behave like this for so many seconds; begin again where it cannot begin, as while the coordinator restarts."""
    try:
        async with asyncio.timeout(each_s):
            await attacker.again_and_again(lambda: behaviour.act(attacker))
    except TimeoutError:
        pass
    return attacker.tally


async def _until_terminated(home: HostileHome, seed: int, each_s: float, names: Sequence[str]) -> None:
    loop, behaving = asyncio.get_running_loop(), asyncio.ensure_future(_behave(home, seed, each_s, names))
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, behaving.cancel)
    try:
        await behaving
    except asyncio.CancelledError:
        return


def main() -> None:
    """Entry point of `python -m edit.lab.hostile`."""
    listed = "\n".join(f"  {behaviour.name:20} {behaviour.text}" for behaviour in BEHAVIOURS.values())
    arguments = argparse.ArgumentParser(
        prog="python -m edit.lab.hostile",
        description=f"Attack a run of the lab.\n\nBehaviours:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    arguments.add_argument("--home", type=Path, required=True, help="folder of the attacker's identities")
    arguments.add_argument("--seed", type=int, default=0, help="of the order of the behaviours, and of their bytes")
    arguments.add_argument("--each", type=float, default=10.0, help="seconds of each behaviour")
    arguments.add_argument("--only", action="append", choices=tuple(BEHAVIOURS), help="a behaviour; repeatable; default: all")
    options = arguments.parse_args()
    names = options.only or [name for name, behaviour in BEHAVIOURS.items() if not behaviour.unfounded]
    os.nice(_NICE)
    torch.set_num_threads(1)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    asyncio.run(_until_terminated(HostileHome(options.home), options.seed, options.each, names))
