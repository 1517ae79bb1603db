"""How much a model that was trained with [privacy] level = "example" really tells: a lower bound of epsilon by many tiny runs.

Half of the runs have a canary among the examples: one whose gradient is always the same, and clipped. Whoever sees the outer
parameters of a run guesses whether it was there, the more of it is in them the surer. From how often the guess is right follows
an epsilon that the training surely exceeds (Clopper and Pearson's bounds; Jagielski et al. 2020, arXiv 2006.07709). It must
stay below the epsilon that the ledger claims. `--noise-share` adds less noise than is
claimed: a twentieth is found out by 160 runs, a quarter is not by 400.

Each run is the worst case: the other examples have no gradient at all, and every inner step draws half of the examples.

    python benchmarks/privacy_canaries.py --runs 1000
    python benchmarks/privacy_canaries.py --runs 160 --noise-multiplier 3 --noise-share 0.05
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from scipy.stats import beta
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from edit.config.run import RunConfig
from edit.integrations.opacus import PrivateGradients
from edit.local import LocalRun
from edit.worker.worker import EditWorker, WorkerConfig

EXAMPLES, BATCH, WIDTH = 20, 10, 16
CONFIDENCE = 0.95


def configuration(steps: int, noise: float, delta: float) -> RunConfig:
    """A run of one outer step that takes the contribution as it is."""
    return RunConfig.from_mapping(
        {
            "inner": {"batch_size": BATCH},
            "sync": {"every": steps, "outer_steps": 1},
            "penalty": {"enabled": False},
            "outer": {"optimizer": "sgd", "lr": 1.0},
            "privacy": {"level": "example", "delta": delta, "epsilon_max": 1000.0, "noise_multiplier": noise},
        }
    )


def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """The mean of y * model(x): the gradient of an example is y * x, whatever the parameters are."""
    x, y = batch
    value: Tensor = (model(x) * y).mean()
    return value


def train(config: RunConfig, canary: bool, ledger: Path, noise_share: float) -> tuple[float, float]:
    """Return how much of the canary is in the outer parameters of a run, and the epsilon that the ledger claims."""
    x, y = torch.zeros(EXAMPLES, WIDTH), torch.zeros(EXAMPLES, 1)
    x[:, 1], y[:] = 1.0, 1e-9  # next to no gradient; none at all would be refused
    if canary:
        x[0], y[0] = 0.0, -1e3
        x[0, 0] = 1.0
    model = nn.Linear(WIDTH, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    collective = LocalRun(config, ["a"]).collective("a")
    with PrivateGradients.of(model, TensorDataset(x, y), loss, config, ledger) as private:
        private._noised.noise_multiplier *= noise_share
        with EditWorker(model, optimizer, collective, WorkerConfig.of(config)) as worker:
            while not worker.finished:
                private.backward()
                optimizer.step()
                worker.synchronize()
        claimed = private._of(0)
    return float(model.weight.detach()[0, 0]), claimed


def lower_bound(with_canary: Sequence[float], without: Sequence[float], delta: float) -> float:
    """Return an epsilon that is exceeded with CONFIDENCE; 0 where nothing follows.

    The guess's threshold is chosen by the first half of the runs, and judged by the second.
    """
    half = len(with_canary) // 2
    chosen = max(
        sorted({*with_canary[:half], *without[:half]}),
        key=lambda threshold: _epsilon(with_canary[:half], without[:half], threshold, delta),
    )
    return _epsilon(with_canary[half:], without[half:], chosen, delta)


def _epsilon(with_canary: Sequence[float], without: Sequence[float], threshold: float, delta: float) -> float:
    right, wrong = (sum(score >= threshold for score in scores) for scores in (with_canary, without))
    risk = (1 - CONFIDENCE) / 2
    least = float(beta.ppf(risk, right, len(with_canary) - right + 1)) if right else 0.0
    most = float(beta.ppf(1 - risk, wrong + 1, len(without) - wrong)) if wrong < len(without) else 1.0
    return max(0.0, math.log((least - delta) / most)) if least > delta else 0.0


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000, help="half of them with the canary")
    parser.add_argument("--steps", type=int, default=8, help="inner steps of a run")
    parser.add_argument("--noise-multiplier", type=float, default=2.0)
    parser.add_argument("--noise-share", type=float, default=1.0, help="of the noise that is claimed, what is added")
    parser.add_argument("--delta", type=float, default=1e-5)
    arguments = parser.parse_args()
    config = configuration(arguments.steps, arguments.noise_multiplier, arguments.delta)
    began, claimed = time.perf_counter(), 0.0
    scores: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.runs):
            canary = number % 2 == 0
            score, claimed = train(config, canary, Path(folder) / f"{number}.jsonl", arguments.noise_share)
            scores[canary].append(score)
    measured = {
        **vars(arguments),
        "claimed_epsilon": round(claimed, 3),
        "lower_bound": round(lower_bound(scores[True], scores[False], arguments.delta), 3),
        "confidence": CONFIDENCE,
        "seconds": round(time.perf_counter() - began, 1),
    }
    print(json.dumps(measured, indent=1))


if __name__ == "__main__":
    main()
