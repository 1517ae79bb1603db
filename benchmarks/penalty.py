"""How often the penalty rejects honest contributions and catches inflated ones, by penalty.delta and penalty.observations (W).

python benchmarks/penalty.py [--spread 0.1] [--peers 500] [--inflation 1.5] [--seed 0]

Norms are drawn, independent of one another, around a level that stays: normal and lognormal, with a standard deviation of
`spread` of the level. That is kinder than training, whose norms drift. A normal value lies above 3 sigma 0.13 % of the time;
what is rejected beyond that comes from estimating mean and sigma from few norms (most in the first rounds that are judged),
from leaving what was rejected out of the estimate, and, lognormal, from the longer tail. The judge is the library's own.
"""

from __future__ import annotations

import argparse
import math
import random

from edit.config.run import PenaltyConfig
from edit.merging.penalty import NormStatistics, judge, observe
from edit.records import Verdict

DELTAS, OBSERVATIONS, ROUNDS = (3.0, 4.0, 5.0), (10, 20, 50), (50, 200, 1000)


def rates(config: PenaltyConfig, rounds: int, args: argparse.Namespace, *, lognormal: bool) -> tuple[float, float]:
    """(share of honest norms that were rejected, share of inflated ones that were caught), of those that were judged."""
    chance, judged, rejected, caught = random.Random(args.seed), 0, 0, 0
    for _ in range(args.peers):
        statistics = NormStatistics()
        for _ in range(rounds):
            drawn = args.spread * chance.gauss(0.0, 1.0)
            norm = math.exp(drawn) if lognormal else 1.0 + drawn
            bad = judge(norm, statistics, config) is not Verdict.OK
            judged += statistics.count >= config.observations
            caught += judge(norm * args.inflation, statistics, config) is not Verdict.OK
            rejected += bad
            statistics = statistics if bad else observe(norm, statistics, config)
    return rejected / judged, caught / judged


def main() -> None:
    """Print a line for each setting, of runs of so many rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spread", type=float, default=0.1)
    parser.add_argument("--peers", type=int, default=500)
    parser.add_argument("--inflation", type=float, default=1.5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(
        f"share of honest norms (spread {args.spread:g}) rejected / of norms times {args.inflation:g} caught, in %, by rounds"
    )
    print(f"{'':9} delta    W" + "".join(f"{rounds:>14}" for rounds in ROUNDS))
    for lognormal in (False, True):
        for delta in DELTAS:
            for observations in OBSERVATIONS:
                config = PenaltyConfig(delta=delta, observations=observations)
                cells = []
                for rounds in ROUNDS:
                    if rounds > observations:
                        honest, inflated = rates(config, rounds, args, lognormal=lognormal)
                        cells.append(f"{100 * honest:.2f} / {100 * inflated:.1f}")
                    else:
                        cells.append("-")
                name = "lognormal" if lognormal else "normal"
                print(f"{name:9} {delta:5g} {observations:4}" + "".join(f"{cell:>14}" for cell in cells))


if __name__ == "__main__":
    main()
