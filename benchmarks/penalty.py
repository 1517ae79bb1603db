"""How often the penalty rejects honest contributions, and catches one that is three times too large, with both detectors.

nice -n 5 python benchmarks/penalty.py [--peers 400] [--seeds 3] [--inflation 3]        # 5 minutes of one core

Norms are lognormal, independent of one another, around a level that stays, or that falls by so many % a round, as norms do with
the learning rate. Each line is of rounds with so many contributors. In each round that is judged, all contributions are judged
as they are, and the first one, for the catch rate, also as if it were inflated. The first rounds of a run are the hardest,
because mean and deviation are known from few norms. The judge is the library's own. benchmarks/damage.py has real trainings.

Limit: how many inflated ones the best of all tests catches that rejects 0.5 % of the honest ones and knows the true mean and
deviation s of log norm: Phi(log 3 / s - 2.58) (Neyman and Pearson 1933). With three or more contributors the detector "level"
is blind to what all share, so that a warm restart is no anomaly: the best such test compares with the mean of the M - 1 others,
so for it the deviation is s sqrt(M / (M - 1)). The table replaces benchmarks/results/penalty.txt.
"""

from __future__ import annotations

import argparse
import datetime
import math
import os
import platform
import random
from pathlib import Path
from statistics import NormalDist

from edit.config.run import PenaltyConfig
from edit.merging.penalty import NormStatistics, judge_round
from edit.records import Verdict

RESULTS = Path(__file__).parent / "results" / "penalty.txt"
DETECTORS, CONTRIBUTORS, ROUNDS = ("edit", "level"), (1, 2, 3, 4, 8), (50, 200)
NORMS = ((0.05, 0.0), (0.1, 0.0), (0.2, 0.0), (0.3, 0.0), (0.1, 0.05))  # spread of log norm, fall of the level per round
ASKED = 0.005  # honest contributions that may be rejected


def rates(
    config: PenaltyConfig,
    contributors: int,
    norms_like: tuple[float, float],
    rounds: int,
    peers: int,
    inflation: float,
    seed: int,
) -> str:
    """Return 'honest contributions rejected / inflated ones caught', in % of those that were judged."""
    chance, judged, rejected, caught, tried = random.Random(seed), 0, 0, 0, 0
    spread, fall = norms_like
    for _ in range(max(1, peers // contributors)):
        history: dict[str, NormStatistics] = {}
        steps = {str(i): 100 for i in range(contributors)}
        for number in range(rounds):
            norms = {peer: (1 - fall) ** number * math.exp(spread * chance.gauss(0.0, 1.0)) for peer in steps}
            verdicts, after = judge_round(norms, steps, history, config)
            if number >= config.observations:
                judged += contributors
                rejected += sum(verdict is Verdict.ANOMALOUS for verdict in verdicts.values())
                inflated = {**norms, "0": inflation * norms["0"]}
                tried += 1
                caught += judge_round(inflated, steps, history, config)[0]["0"] is Verdict.ANOMALOUS
            history |= after
    return f"{100 * rejected / judged:.2f} / {100 * caught / tried:.1f}"


def limit(detector: str, contributors: int, spread: float, inflation: float) -> float:
    """Return the share of inflated contributions that the best test catches, see above."""
    shared = detector == "level" and contributors >= 3
    deviation = spread * (math.sqrt(contributors / (contributors - 1)) if shared else 1.0)
    normal = NormalDist()
    return normal.cdf(math.log(inflation) / deviation - normal.inv_cdf(1 - ASKED))


def main() -> None:
    """Print and record a line for each detector, number of contributors and kind of norms: a cell for each length and seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--inflation", type=float, default=3.0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    command = f"python benchmarks/penalty.py --peers {args.peers} --seeds {args.seeds} --inflation {args.inflation:g}"
    lines = [
        f"{datetime.date.today().isoformat()}, {platform.machine()}, {os.cpu_count()} cores; {command}",
        f"honest contributions rejected / those times {args.inflation:g} caught, in %, after W rounds; {args.seeds} seeds each",
        f"{'detector':9}{'peers':>6}{'spread':>8}{'fall, %':>9}{'limit, %':>10}"
        + "".join(f"{f'{rounds} rounds':^{15 * args.seeds + 2}}" for rounds in ROUNDS).rstrip(),
    ]
    print("\n".join(lines))
    for detector in DETECTORS:
        for contributors in CONTRIBUTORS:
            for spread, fall in NORMS:
                config = PenaltyConfig(detector=detector)
                cells = [
                    rates(config, contributors, (spread, fall), rounds, args.peers, args.inflation, seed)
                    for rounds in ROUNDS
                    for seed in range(args.seeds)
                ]
                best = 100 * limit(detector, contributors, spread, args.inflation)
                name = f"{detector:9}{contributors:6}{spread:8g}{100 * fall:9g}{best:10.1f}"
                lines.append(name + "".join(f"{cell:>15}" for cell in cells))
                print(lines[-1], flush=True)
    args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
