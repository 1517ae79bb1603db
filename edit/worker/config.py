"""`WorkerConfig`: the sections of a run's configuration that a worker needs, and what only this peer decides."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

from edit.config.algorithm import OuterConfig, RoundsConfig, SyncConfig, check_together
from edit.config.codec import CodecChoice, CodecConfig
from edit.config.run import PenaltyConfig, RunConfig
from edit.config.validation import one_of, require

__all__ = ["WorkerConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """What an `EditWorker` needs to know of its run. All peers of a run have equal sections `sync`, `codec`, `rounds`, `outer`.

    Raises ConfigError, naming the setting, where two sections do not go together or `buffers` is unknown.
    """

    # When to contribute, and how an update is applied.
    sync: SyncConfig = field(default_factory=SyncConfig)
    # `codec.up` encodes the contributions, and the run takes no other; an update names its own codec.
    codec: CodecConfig = field(default_factory=CodecConfig)
    # Only `rounds.max_staleness` matters to a worker: with more than 0 a contribution may count in a later round.
    rounds: RoundsConfig = field(default_factory=RoundsConfig)
    # The run's outer optimizer. Only sync.mode = "eager", which estimates its step, uses it.
    outer: OuterConfig = field(default_factory=OuterConfig)
    # "local": each peer keeps its own buffers. "average": the persistent floating-point buffers are exchanged as one more
    # fragment, in fp32, and become the plain mean of the peers': no penalty, no outer optimizer. Integer buffers stay local.
    buffers: str = "local"
    # Whether nothing but optimizer.step() writes to the parameters. True: what a lossy codec leaves out of a contribution is
    # computed when its outcome is known, and until then takes no memory; a write between, with `.data` too, which is not
    # noticed, would damage it. False: "blocking" and "forward" keep a second residual while they wait. ("delayed" and "eager"
    # keep what they need anyway.) Either way "blocking" and "forward" refuse a write while they wait; see `EditWorker`.
    only_steps_write: bool = False
    # Whether the run asks for privacy.level = "example": the model must then have the gradients of `edit.integrations.opacus`.
    private: bool = False
    # Whether contributions are masked (secagg.enabled): they go onto the grid of their round instead of into `codec.up`, and
    # each weighs itself as `penalty` says.
    masked: bool = False
    # Only with `masked`.
    penalty: PenaltyConfig = field(default_factory=PenaltyConfig)
    # How many updates the run keeps, so how far behind it a peer may be that takes them instead of all parameters.
    kept_updates: int = 0

    def __post_init__(self) -> None:
        check_together(self.sync, self.rounds, self.outer, self.codec)
        require(self.buffers != "lowest", "buffers", self.buffers, "a merge weighs all peers and cannot take one peer's alone")
        one_of("buffers", self.buffers, ("local", "average"))
        if self.buffers == "average":
            require(not self.masked, "buffers", self.buffers, 'must be "local" with secagg.enabled: they fit no grid')
            rule = 'must be "local" with privacy.level = "example": buffers have no noise'
            require(not self.private, "buffers", self.buffers, rule)
            rule = 'must be "local" with rounds.merging = "arrivals": one peer\'s buffers alone are no mean'
            require(self.rounds.merging == "rounds", "buffers", self.buffers, rule)

    def refuse_other(self, run: RunConfig) -> None:
        """Raise ConfigError, naming the setting, where these are not the sections of that run in what contributions depend on.

        What a peer may have of its own, such as `sync.every`, is not compared.
        """
        pairs: list[tuple[str, object, object]] = [
            ("sync.groups", self.sync.groups, run.sync.groups),
            ("secagg.enabled", self.masked, run.secagg.enabled),
        ]
        if run.privacy.of_examples and not self.private:
            pairs.append(("privacy.level", "none", run.privacy.level))
        if run.secagg.enabled:  # each peer weighs itself
            pairs.append(("penalty", self.penalty, run.penalty))
        if run.sync.groups > 1:
            pairs.append(("sync.pattern", self.sync.pattern, run.sync.pattern))
        if not run.secagg.enabled:  # else a grid takes the codec's place
            own, theirs = self.codec.uplink, run.codec.uplink
            pairs += [("codec.up", str(own.default), str(theirs.default)), ("codec.fragments", _texts(own), _texts(theirs))]
        for name, mine, value in pairs:
            require(mine == value, name, mine, f"the run has {value!r}; give the EditWorker WorkerConfig.of(run)")

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Return the sections of a run's configuration, with local buffers."""
        private = config.privacy.of_examples
        masked = config.secagg.enabled
        return cls(
            sync=config.sync,
            codec=config.codec,
            rounds=config.rounds,
            outer=config.outer,
            private=private,
            masked=masked,
            penalty=config.penalty if masked else PenaltyConfig(),
            kept_updates=config.kept_updates,
        )


def _texts(choice: CodecChoice) -> dict[str, str]:
    return {pattern: str(spec) for pattern, spec in choice.fragments}
