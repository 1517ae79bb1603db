"""How often the penalty rejects honest contributions, and catches one that is three times too large, with both detectors.

python benchmarks/penalty.py [--peers 400] [--seeds 3] [--inflation 3] [--out benchmarks/results/penalty.txt]

Norms are lognormal, independent of one another, around a level that stays: that is kinder than training, whose norms drift.
Each line is of rounds with so many contributors; with three or more the detector "level" judges relative to their median. In
each round that is judged, all contributions are judged as they are, and the first one, for the catch rate, also as if it were
inflated. The first rounds of a run are the hardest, because mean and deviation are known from few norms. The judge is the
library's own.
"""

from __future__ import annotations

import argparse
import math
import random
from pathlib import Path

from edit.config.run import PenaltyConfig
from edit.merging.penalty import NormStatistics, judge_round
from edit.records import Verdict

DETECTORS, CONTRIBUTORS, SPREADS, ROUNDS = ("edit", "level"), (1, 2, 3, 4, 8), (0.05, 0.1, 0.2, 0.3), (50, 200)


def rates(config: PenaltyConfig, contributors: int, spread: float, rounds: int, peers: int, inflation: float, seed: int) -> str:
    """'honest contributions rejected / inflated ones caught', in % of those that were judged."""
    chance, judged, rejected, caught, tried = random.Random(seed), 0, 0, 0, 0
    for _ in range(max(1, peers // contributors)):
        history: dict[str, NormStatistics] = {}
        steps = {str(i): 100 for i in range(contributors)}
        for number in range(rounds):
            norms = {peer: math.exp(spread * chance.gauss(0.0, 1.0)) for peer in steps}
            verdicts, after = judge_round(norms, steps, history, config)
            if number >= config.observations:
                judged += contributors
                rejected += sum(verdict is Verdict.ANOMALOUS for verdict in verdicts.values())
                inflated = {**norms, "0": inflation * norms["0"]}
                tried += 1
                caught += judge_round(inflated, steps, history, config)[0]["0"] is Verdict.ANOMALOUS
            history |= after
    return f"{100 * rejected / judged:.2f} / {100 * caught / tried:.1f}"


def main() -> None:
    """Print a line for each detector, number of contributors and spread: per length of the run, one cell for each seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--inflation", type=float, default=3.0)
    parser.add_argument("--out", type=Path, help="append the table to this file as well")
    args = parser.parse_args()
    lines = [
        f"honest contributions rejected / those times {args.inflation:g} caught, in %, after W rounds; {args.seeds} seeds each",
        f"{'detector':9}{'peers':>6}{'spread':>8}"
        + "".join(f"{f'{rounds} rounds':^{15 * args.seeds + 2}}" for rounds in ROUNDS).rstrip(),
    ]
    print("\n".join(lines))
    for detector in DETECTORS:
        for contributors in CONTRIBUTORS:
            for spread in SPREADS:
                config = PenaltyConfig(detector=detector)
                cells = [
                    rates(config, contributors, spread, rounds, args.peers, args.inflation, seed)
                    for rounds in ROUNDS
                    for seed in range(args.seeds)
                ]
                lines.append(f"{detector:9}{contributors:6}{spread:8g}" + "".join(f"{cell:>15}" for cell in cells))
                print(lines[-1], flush=True)
    if args.out:
        with args.out.open("a") as file:
            file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
