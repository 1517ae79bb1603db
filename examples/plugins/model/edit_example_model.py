"""An LSTM over tokens.

run.toml:   [model]
            name = "entry:lstm"
            context = 128
            vocabulary = 256
            options = { hidden = 256 }
"""

import torch.nn.functional as F
from torch import nn


class LSTM(nn.Module):
    """Built with random values that the run's seed gives; forward returns the mean loss."""

    def __init__(self, options):
        """options: those of [model.options], and context and vocabulary."""
        super().__init__()
        hidden, vocabulary = int(options.get("hidden", 64)), int(options["vocabulary"])
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.lstm = nn.LSTM(hidden, hidden, batch_first=True)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, tokens, targets):
        """tokens, targets: int64 [batch, context]."""
        states, _ = self.lstm(self.embedding(tokens))
        return F.cross_entropy(self.head(states).flatten(0, 1), targets.flatten())
