"""Lion (arXiv 2302.06675) as an outer optimizer: s = lr sign(b1 m + (1 - b1) D); m <- b2 m + (1 - b2) D.

run.toml:   [outer]
            optimizer = "entry:lion"
            lr = 1e-3
            options = { beta1 = 0.9, beta2 = 0.99 }
"""

import torch


class Lion:
    """One object for the whole run. All state is in the slots, so a replay of the journal gives the same bits."""

    def __init__(self, config):
        """config: the section [outer], an `edit.OuterConfig`."""
        self.lr = config.lr
        self.beta1 = float(config.options.get("beta1", 0.9))
        self.beta2 = float(config.options.get("beta2", 0.99))
        if unknown := set(config.options) - {"beta1", "beta2"}:
            raise ValueError(f"outer.options: unknown {sorted(unknown)}; there are beta1 and beta2")

    def slots(self, numel):
        """Return the state before the first step: fp32 tensors of numel elements, or of one."""
        return {"momentum": torch.zeros(numel)}

    def step(self, slots, merged):
        """Return (s, new slots) for one piece of a fragment; theta <- theta - s. Element by element."""
        momentum = slots["momentum"]
        direction = momentum.mul(self.beta1).add_(merged.mul(1 - self.beta1))
        return direction.sign_().mul_(self.lr), {"momentum": momentum.mul(self.beta2).add_(merged.mul(1 - self.beta2))}
