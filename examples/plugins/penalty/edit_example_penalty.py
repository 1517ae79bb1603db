"""A norm more than `factor` times the median of its round is anomalous; nothing is learned from round to round.

run.toml:   [penalty]
            detector = "entry:factor"
            options = { factor = 3.0 }
"""

from statistics import median

from edit import Verdict


class Factor:
    """Judges finite norms; what is not finite never comes here, and always has weight 0."""

    def __init__(self, config):
        """config: the section [penalty], an `edit.PenaltyConfig`."""
        self.factor = float(config.options.get("factor", 3.0))
        if not self.factor > 1:
            raise ValueError(f"penalty.options.factor = {self.factor}: must be above 1")

    def judge(self, norms, inner_steps, before):
        """Return the verdicts, and what is remembered of each peer (NormStatistics); all by peer_id."""
        limit = self.factor * median(norms.values()) if norms else 0.0
        verdicts = {peer: Verdict.ANOMALOUS if norm > limit else Verdict.OK for peer, norm in norms.items()}
        return verdicts, {}
