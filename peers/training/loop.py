"""The training loop of one rank, once the run's configuration is known: trainer, worker, data and checkpoints together.

It says what is reported and when the peer is done. Of the carrier it knows `RunConnection` only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch

from edit import kernels
from edit.collective import Collective, CompositeCollective
from edit.config.run import RunConfig
from edit.errors import ConfigError
from edit.fragments.schema import plan_fragments
from edit.heaps import return_free_memory
from edit.replica.ranks import Ranks
from edit.telemetry import Telemetry
from edit.trackers.background import Trackers
from edit.worker.log_values import log_values
from edit.worker.worker import EditWorker, WorkerConfig
from editpb.identity import Identity
from peers.carriers.run_connection import Interrupted, Origin, RunConnection
from peers.models.registry import build
from peers.training.checkpoint import PeriodicCheckpoints, Resumable
from peers.training.checkpoint_files import Checkpoints, Owner
from peers.training.data import stream_seed
from peers.training.data_source import DataSource, open_data
from peers.training.exchange_spans import TracedCollective
from peers.training.fault_injection import FaultInjector
from peers.training.metrics import EVERY, Metrics
from peers.training.options import PeerOptions
from peers.training.private import LEDGER, private_gradients
from peers.training.sharding import RankLayout, shard_model
from peers.training.trainer import Trainer

__all__ = ["Place", "Training"]

_log = logging.getLogger("peers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Who and where this process is."""

    identity: Identity  # of the peer
    device: torch.device
    layout: RankLayout  # how the replica is divided over its ranks
    ranks: Ranks  # of the replica, and which of them this is
    restarts: int = 0  # how often torchrun started it again


class _CutOff(Exception):
    """The run is over, and whoever has the outcome of the last contribution is not heard."""


class Training:
    """One rank's training in one run."""

    def __init__(
        self,
        options: PeerOptions,
        config: RunConfig,
        place: Place,
        connection: RunConnection,
        metrics: Metrics,
        trackers: Trackers | None = None,
        telemetry: Telemetry | None = None,
    ) -> None:
        self._options = options
        self._config = config
        self._place = place
        self._connection = connection
        self._metrics = metrics
        self._trackers = trackers or Trackers()
        self._telemetry = telemetry
        self._tracked = -1  # the outer step that the trackers were told of last
        self._kind = "aggregator" if config.swarm is None else "part"  # what has a share of the model
        self._seconds: deque[float] = deque(maxlen=20)  # of the last inner steps
        self._loss = math.nan  # of the last steps, for the log
        self._origins: dict[int, Origin] = {}  # by aggregator: of the last snapshot that metrics tell of
        self._told: dict[int, tuple[int, str]] = {}  # by aggregator: the outer step and reason logged last

    def run(self, run_step: int) -> None:
        """Train until the run is over. run_step: an outer step that every aggregator has reached.

        Raises Interrupted, EvictedError, RefusedError, ConfigError.
        """
        config, place = self._config, self._place
        if self._options.max_epsilon is not None and not config.privacy.of_examples:
            raise ConfigError(
                f"--max-epsilon {self._options.max_epsilon:g}: the run has no differential privacy of examples "
                f'(privacy.level = "{config.privacy.level}"); nothing of the data was sent'
            )
        batches = self._batches()
        trainer = self._trainer(batches, founded=run_step > 0)
        settings = dataclasses.replace(WorkerConfig.of(config), only_steps_write=True)
        collective = CompositeCollective(self._traced(), self._options.policy.protect.clip, self._connection.reached)
        worker = EditWorker(trainer.model, trainer.optimizers, collective, settings, place.ranks, time.monotonic, leave="local")
        faults = FaultInjector(trainer.model, worker, config.sync.interval_at, self._options.faults, _log.warning)
        trainer.optimizer.register_step_post_hook(faults.damage)  # before the worker's own hook
        saving = self._saving(Resumable(trainer, batches, worker, place.ranks, self._options.new_data))
        with contextlib.suppress(_CutOff), contextlib.ExitStack() as stack:
            if trainer.private is not None:
                stack.callback(trainer.private.close)
            saving.resume(run_step)
            if trainer.private is not None:
                trainer.private.refuse_uncounted(trainer.steps, "the checkpoint")
                _log.info("%s", trainer.private.statement())
            try:
                stack.enter_context(worker)
            except ConfigError as error:
                raise saving.explain(error) from error
            _log.info(kernels.load())
            return_free_memory()  # of the initial parameters, the snapshot's messages, the checkpoint
            _log.info("joined at outer step %d, digest %s", worker.outer_step, worker.digest[:12])
            self._told = {number: (share.outer_step, "") for number, share in enumerate(worker.shares)}
            saving.begin(worker.outer_step)
            self._tracked = worker.outer_step
            self._show(worker)
            self._loop(trainer, worker, saving)
            over = self._over(worker)  # else the budget of privacy is spent
            saving.save_last()
            if any(share.pending for share in worker.shares) and all(share.cut_off for share in self._connection.shares):
                raise _CutOff  # leaving would wait, with sync.strict for ever, for who serves the run no more
        if trainer.private is not None:
            _log.info("%s", trainer.private.statement())
            if not over:
                raise trainer.private.spent()
        for number, share in enumerate(worker.shares):
            if len(worker.shares) > 1:
                _log.info("%s %d: outer step %d, digest %s", self._kind, number, share.outer_step, share.digest[:12])
        _log.info("the run has finished at outer step %d, digest %s: %s", worker.outer_step, worker.digest[:12], self._ending())

    def _traced(self) -> Sequence[Collective]:
        """Return the connections, each traced where there is somebody who wants to know."""
        shares, told, run_id = self._connection.shares, self._telemetry, self._place.identity.run_id
        if told is None:
            return shares
        return [TracedCollective(share, told, run_id, part, time.time) for part, share in enumerate(shares)]

    def _batches(self) -> DataSource:
        """Return the data: the same rows in the same order at every rank."""
        ranks, options = self._place.ranks, self._options
        request = options.data_request(self._config, self._connection.peer_id)
        source = ranks.together(lambda: open_data(request, options.data_plugin, options.allowed))
        ranks.same("the data in --data", source.fingerprint)
        return source

    def _trainer(self, batches: DataSource, *, founded: bool) -> Trainer:
        config, layout = self._config, self._place.layout
        # ranks that compute the same rows draw the same random numbers
        torch.manual_seed(stream_seed(config.seed, f"{self._connection.peer_id} {layout.data_rank}"))
        allowed, folder = self._options.allowed, self._options.model_folder
        private, checked = None, config.privacy.of_examples  # which needs values
        model = build(config.model, config.seed, allowed, folder=folder, replaced=founded and not checked)
        self._options.policy.check_parameters(sum(parameter.numel() for parameter in model.parameters()))
        if checked:
            ledger, most = self._options.home / LEDGER, self._options.max_epsilon
            private = private_gradients(batches, config, ledger, self._place.device, layout, most)
        return Trainer(
            shard_model(model, layout),
            batches,
            config.inner,
            total_steps=config.sync.inner_steps_before(config.sync.outer_steps),
            device=self._place.device,
            clock=time.perf_counter,
            layout=layout,
            allowed=allowed,
            private=private,
        )

    def _saving(self, resumable: Resumable) -> PeriodicCheckpoints:
        options, place = self._options, self._place
        if options.checkpoint_every == 0:
            return PeriodicCheckpoints(resumable, None)
        schema = plan_fragments(resumable.trainer.model.named_parameters())
        owner = Owner(run_id=place.identity.run_id, peer_id=place.identity.peer_id, schema_hash=schema.schema_hash)
        checkpoints = Checkpoints(options.checkpoint_folder, owner, options.keep_checkpoints, place.ranks)
        if options.fresh and place.restarts == 0:
            checkpoints.set_aside()
        return PeriodicCheckpoints(resumable, checkpoints, options.checkpoint_every, strict=self._config.sync.strict)

    def _position(self, worker: EditWorker) -> int:
        """Return the run's global inner step; what is contributed counts as exchanged, an outer step as inner ones by its H.

        Of several aggregators the furthest counts: the others lack outer steps, not training.
        """
        sync = self._config.sync
        reached = [(share.outer_step + share.pending, share.round_inner_steps) for share in worker.shares]
        return max(sync.inner_steps_before(step) + min(taken, sync.interval_at(step)) for step, taken in reached)

    def _soonest(self, worker: EditWorker) -> int:
        """Return the fewest inner steps to the next contribution; an outcome that is awaited may change H."""
        sync = self._config.sync
        if not sync.milestones:
            return sync.interval
        return min(sync.least_interval(share.outer_step, share.outer_step + share.pending) for share in worker.shares)

    def _loop(self, trainer: Trainer, worker: EditWorker, saving: PeriodicCheckpoints) -> None:
        """Take inner steps until training is over. Asked to stop, in whichever wait, save what is trained."""
        while True:
            taken, stepping = trainer.steps, False
            try:
                if self._over(worker):
                    return
                self._connection.check()
                worker.take_awaited()  # between two steps, rather than in the next forward
                if self._over(worker):  # no step follows the last outcome: what is saved does not depend on when it came
                    self._tell(worker)  # nor would one tell of it
                    return
                if worker.round_inner_steps + 1 >= self._soonest(worker):
                    saving.before_contribution()
                if trainer.private is not None and not trainer.private.ready():
                    return
                stepping = True
                self._step(trainer, worker)
            except Interrupted:
                # A forward that waited for an update and was broken off leaves shards gathered: they cannot be saved.
                whole = trainer.steps > taken or self._place.layout.mesh is None
                if not stepping or (whole and not self._config.sync.strict):
                    saving.save_last()
                raise
            saving.after_step(worker.outer_step)

    def _over(self, worker: EditWorker) -> bool:
        """Return whether training is over. Catch up with a run that has ended first, unless cut off from it."""
        last = self._config.sync.outer_steps
        if all(share.finished or share.outer_step >= last for share in worker.shares):
            return True
        if not self._connection.ended:
            return False
        cut_off = [share.cut_off for share in self._connection.shares]
        if not all(cut_off):
            pending = (share.pending and not cut for share, cut in zip(worker.shares, cut_off, strict=True))
            if self._config.sync.strict and any(pending):
                return False  # its outcome is taken after a set number of steps, no sooner where the news came sooner
            worker.synchronize()
            self._tell(worker)
        return all(share.finished or cut for share, cut in zip(worker.shares, cut_off, strict=True))

    def _ending(self) -> str:
        sync, views = self._config.sync, [share.last_view for share in self._connection.shares]
        view = next((view for view in views if view is not None and view.outer_step < sync.outer_steps), None)
        if view is None:
            return f"all {sync.outer_steps} outer steps are taken"
        if view.draining:
            return "its operator drained it"
        if self._config.privacy.of_organisations and view.reason:
            return view.reason
        return f"sync.tokens = {sync.tokens} are merged"

    def _step(self, trainer: Trainer, worker: EditWorker) -> None:
        def position() -> int:
            worker.count_tokens(trainer.batch * self._config.model.context)  # of a step that is taken
            return self._position(worker)

        result = trainer.step(position)
        if worker.round_inner_steps == 0 and trainer.exchanged():
            _log.info("the batch is doubled to %d sequences in an inner step, by the norm test", trainer.batch)
        hidden = self._options.hide_loss or trainer.private is not None
        if not hidden:
            worker.report(loss=result.loss)
        if trainer.private is not None:
            worker.report(epsilon=trainer.private.epsilon)
        self._loss = result.loss if hidden else worker.speed.loss
        self._seconds.append(result.seconds)
        self._show(worker)
        self._tell(worker)
        self._metrics.step(worker.inner_steps, result.loss, worker.speed.tokens_per_s, worker.outer_step)
        if worker.inner_steps % EVERY == 0:
            self._trackers.log(worker.inner_steps, {"loss": result.loss, "tokens_per_s": worker.speed.tokens_per_s})
        if self._options.throttle > 1:
            with contextlib.suppress(Interrupted):  # all ranks stop together, at the next look
                self._connection.pause((self._options.throttle - 1) * median(self._seconds))

    def _show(self, worker: EditWorker) -> None:
        """Tell metrics where the outer parameters came from, and offer them to members that join."""
        for number, connection in enumerate(self._connection.shares):
            if (origin := connection.origin) is not None and origin is not self._origins.get(number):
                self._origins[number] = origin
                self._metrics.snapshot(origin.outer_step, origin.digest, origin.sources)
        self._connection.show(worker.outer_of)

    def _tell(self, worker: EditWorker) -> None:
        """Log, for each aggregator, a change of its outer step or reason: in one line what is the same of all."""
        if self._trackers and worker.outer_step != self._tracked:
            self._tracked = worker.outer_step
            self._trackers.log(worker.inner_steps, log_values(worker, self._connection.peer_id, self._connection))
        now = {number: (share.outer_step, share.reason) for number, share in enumerate(worker.shares)}
        changed = {number: news for number, news in now.items() if self._told.get(number) != news}
        self._told |= changed
        together = len(changed) == len(now) and len({*changed.values()}) == 1
        for number, (outer_step, reason) in changed.items():
            if number == 0 or not together:
                of = f"{self._kind} {number}: " if not together else ""
                _log.info("%souter step %d, loss %.4f: %s", of, outer_step, self._loss, reason)
            self._metrics.outer(outer_step, worker.shares[number].digest, reason, number)
