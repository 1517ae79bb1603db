"""What inner settings are worth: a quarter of the standard library's source, trained alone; held-out loss on a mix of all.

    .venv/bin/python benchmarks/inner_settings.py --steps 300 --lr 2e-3 3e-3 4e-3
    .venv/bin/python benchmarks/inner_settings.py --steps 300 --lr 3e-3 --average 20

Settings of one call take turns step by step, so a busy machine slows all of them alike. `--average H` adds, per rate, four
peers, one per quarter, whose parameters are averaged every H steps (outer lr 1, no momentum, nothing encoded): the gain that an
exchange can bring at these settings. One line of JSON per setting.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from edit.config.run import InnerConfig, ModelConfig
from edit.lab.demo.corpus import SourceFile, plan_corpus, standard_library
from peers.models.gpt import GPT
from peers.training.data import SEPARATOR, Batches, Tokens, evaluate
from peers.training.trainer import Trainer, use_threads

QUARTERS = 4


def joined(files: Iterable[SourceFile], origin: str) -> Tokens:
    """All files as one row of bytes."""
    text = bytes([SEPARATOR]).join(file.path.read_bytes() for file in files)
    return Tokens(np.frombuffer(text, dtype=np.uint8), origin, 256)


def average(models: Sequence[nn.Module]) -> None:
    """Give every model the mean of all."""
    with torch.no_grad():
        for group in zip(*(model.parameters() for model in models), strict=True):
            mean = torch.stack([parameter.data for parameter in group]).mean(dim=0)
            for parameter in group:
                parameter.copy_(mean)


def trainers(model: ModelConfig, inner: InnerConfig, texts: Sequence[Tokens], steps: int, seed: int) -> list[Trainer]:
    """One trainer per text, all from the same initial values."""
    return [
        Trainer(
            GPT(model, seed),
            Batches(text, model.context, inner.batch_size, seed + index),
            inner,
            total_steps=steps,
            device=torch.device("cpu"),
            clock=time.perf_counter,
        )
        for index, text in enumerate(texts)
    ]


def main() -> None:
    """Read the command line, train, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, nargs="+", default=[InnerConfig().lr])
    parser.add_argument("--average", type=int, default=0, metavar="H")
    parser.add_argument("--seed", type=int, default=0)
    for name in ("layers", "heads", "width", "context"):
        parser.add_argument(f"--{name}", type=int, default=getattr(ModelConfig(), name))
    parser.add_argument("--batch", type=int, default=InnerConfig().batch_size)
    arguments = parser.parse_args()
    use_threads(1)
    groups = plan_corpus(standard_library(), QUARTERS, arguments.seed)
    texts = [joined(group.train, f"quarter {index}") for index, group in enumerate(groups)]
    held_out = joined((file for group in groups for file in group.held_out), "held out")
    model = ModelConfig(layers=arguments.layers, heads=arguments.heads, width=arguments.width, context=arguments.context)
    settings: dict[str, list[Trainer]] = {}
    for lr in arguments.lr:
        inner = replace(InnerConfig(), lr=lr, batch_size=arguments.batch)
        settings[f"alone, lr {lr:g}"] = trainers(model, inner, texts[:1], arguments.steps, arguments.seed)
        if arguments.average:
            name = f"{QUARTERS} peers averaged every {arguments.average}, lr {lr:g}"
            settings[name] = trainers(model, inner, texts, arguments.steps, arguments.seed)
    seconds: dict[str, list[float]] = {name: [] for name in settings}
    for step in range(1, arguments.steps + 1):
        for name, group in settings.items():
            seconds[name] += [trainer.step().seconds for trainer in group]
            if len(group) > 1 and (step % arguments.average == 0 or step == arguments.steps):
                average([trainer.model for trainer in group])
    for name, group in settings.items():
        loss = evaluate(group[0].model, held_out, model.context, max_batches=16)
        step_ms = 1e3 * statistics.median(seconds[name])
        print(
            json.dumps(
                {"setting": name, "steps": arguments.steps, "held_out_loss": round(loss, 4), "step_ms": round(step_ms, 1)}
            )
        )


if __name__ == "__main__":
    main()
