"""Stands in for edit-coordinator and edit-peer: their command lines and files, no training. Run as a script by test_demo.py.

argv: coordinator|peer [--dies NAME] COMMAND ... The coordinator commits twelve outer steps at its first start, eight at the
next.
"""

import json
import signal
import sys
from pathlib import Path


def option(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


def wait_for_the_end() -> None:
    while True:
        signal.pause()


def round_line(step: int) -> dict[str, object]:
    peers = {f"peer-{index}": ["ok", 1.0, 0.25] for index in range(4)}
    if step == 3:
        peers["peer-3"] = ["nonfinite", None, 0.0]
    fragment = {"fragment_id": 0, "merged_norm": 1.0, "clip": 1.0, "peers": peers}
    line = {"kind": "round", "t": 1e9 + step, "round_id": 1_000_000 + step, "outer_step": step, "committed": True}
    sizes = {"seconds": 1.0, "bytes_in": 4000, "bytes_out": 1000, "missing": [], "digest": f"d{step}"}
    return {**line, **sizes, "reason": "all in", "verdicts": [fragment]}


def peer_line(step: int, index: int) -> dict[str, object]:
    line = {"kind": "peer", "t": 1e9 + step, "peer_id": f"peer-{index}", "state": "training", "outer_step": step}
    numbers = {"inner_steps": 10 * step, "loss": 5.0 - step / 10, "tokens_per_s": 100.0}
    return {**line, **numbers, "bytes_sent": 1000 * step, "bytes_received": 1000 * step, "digest": f"d{step}"}


def serve(state: Path) -> None:
    starts = state / "starts"
    again = starts.exists()
    starts.touch()
    with (state / "metrics.jsonl").open("a") as file:
        for step in range(13, 21) if again else range(1, 13):
            for line in (round_line(step), *(peer_line(step, index) for index in range(4))):
                file.write(json.dumps(line) + "\n")
    (state / "addresses.json").write_text("{}")
    wait_for_the_end()


def alone(out: Path) -> None:
    out.mkdir()
    lines = [{"kind": "alone", "step": step, "loss": 4.0, "t": 0.1} for step in (10, 20)]
    lines.append({"kind": "alone", "step": 20, "validation_loss": 3.9})
    (out / "alone.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (out / "model.safetensors").touch()


def main() -> None:
    command = next(word for word in sys.argv if word in ("init", "serve", "invite", "join", "run", "alone", "audit"))
    if command == "init":
        state = Path(option("--state"))
        state.mkdir()
        (state / "run.json").write_text(json.dumps({"run_id": "demo-fake"}))
    elif command == "serve":
        serve(Path(option("--state")))
    elif command == "invite":
        print(f"edit1.{sys.argv[-1]}")
        print("for a peer, single use", file=sys.stderr)
    elif command == "join":
        home = Path(option("--home"))
        home.mkdir(parents=True)
        (home / "invitation").write_text(sys.argv[sys.argv.index("join") + 1])
    elif command == "audit":
        assert json.loads((Path(option("--state")) / "run.json").read_text())
        print("run demo-fake: 21 entries, 20 commits, 80 signatures: verified")
    elif command == "alone":
        alone(Path(option("--out")))
    elif "--dies" in sys.argv and option("--home").endswith(option("--dies")):
        print("peer: the data folder is on fire")
        sys.exit(70)
    else:
        wait_for_the_end()


main()
