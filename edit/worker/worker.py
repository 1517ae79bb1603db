"""`EditWorker`: hooks a user's own optimizer and model, so that a plain PyTorch loop trains with the other peers.

It says when a peer acts. After an optimizer step at which the schedule says so: catch up, contribute. Before the next forward
(or optimizer step), or after so many more steps, as the mode says: take the outcome, once. What follows from an outcome is
decided in `edit.worker.exchange` and carried out in `edit.worker.apply`. A run with several aggregators has an exchange with
each, for its share of the fragments. Rules:

- Nothing but an optimizer step starts an exchange; forwards, evaluation, checkpointing and state_dict() never do (T5 to T8).
- Theta, local parameters and residuals move together, on a commit, and only then.
- While a contribution is FRESH the next forward waits for its outcome (`blocking`, `forward`). It is OVERDUE when training
  goes on without one for longer than planned: the carrier is cut off (it is in doubt), or it was sent again after coming too
  late. Then it is asked for after optimizer steps, and the progress made since sending is replayed.
- All shares contribute at the same optimizer step: one that had no outcome for a while (its aggregator was away), or came too
  late, waits for the others' next contribution. Else two peers could wait for each other, at one aggregator each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, Self, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from edit import kernels
from edit.collective import Collective, CompositeCollective, config_of, ranks_of, shares_of
from edit.config.run import RunConfig
from edit.config.validation import one_of
from edit.errors import ConfigError, LocalProtocolError
from edit.fragments.digest import combine
from edit.fragments.schema import Schema
from edit.records import Commit, Progress, Verdict
from edit.replica.layout import is_sharded
from edit.replica.ranks import ALONE, Ranks
from edit.replica.replica import Outer, Replica
from edit.worker.aggregator_shares import (
    AggregatorShare,
    begin_all,
    join_all,
    joint_state,
    refuse_small_shares,
    separate_states,
)
from edit.worker.apply import ShareExchange
from edit.worker.batches import agreed, epochs
from edit.worker.checkpoint import Checkpoint, kinds_needed, skeleton
from edit.worker.config import WorkerConfig
from edit.worker.hooks import Hook, after_backward, in_backward
from edit.worker.local_buffers import LocalBuffers
from edit.worker.speed import Speed, Stopwatch
from edit.worker.trained import ForeignParameters, refuse_foreign
from edit.worker.unwrap import innermost_model, innermost_optimizers, is_replicated, wrapped

__all__ = ["EditWorker", "WorkerConfig"]

_Batch = TypeVar("_Batch")
# Of one optimizer, before the first and between two steps of the one whose step counts; if more, those of two contributions.
_STEPS_OF_OTHERS = 200  # a WGAN's critic takes 100
_IDLE_BATCHES = 10_000  # without a step that counts, more than any accumulates: `until_finished` looks if the run has ended
# What to do where the connection is of more ranks than the worker, or of fewer.
_GIVE_ALL = (
    "give it the model in its DistributedDataParallel, or ranks=Ranks.world() (of edit.replica.ranks) where your loop averages "
    "the gradients itself; or connect one rank alone, with ranks=ALONE"
)
_CONNECT_ALL = "connect in each rank, once torch.distributed is initialised, and leave out `ranks` there"


class EditWorker:
    """Trains `model` with the other peers of `collective`, from inside the user's own loop.

    A context manager: entering joins the run and loads its outer parameters into the model (they replace the model's own,
    unless this peer founds the run, or `load_state_dict` came before); leaving waits for the last outcome and removes every
    hook. In between, loop as always: only `optimizer.step()` counts, however many backwards stand behind it. Parameters frozen
    before entering are not exchanged, and must be equal at all peers; buffers are exchanged as the configuration says. To
    unfreeze or replace a parameter after entering (a new head, `load_state_dict(assign=True)`) is a ConfigError at the next
    contribution, a replaced one also on leaving. One that is frozen after entering is still exchanged, and moved by merges and
    by the outer momentum: a warning says so once. So does one of what the optimizer trains that is not of the model. A compiled
    `optimizer.step` breaks its graph at the exchange.

    A loop that calls parts of the model, never the model that it gave here (or only a compiled copy), takes the outcome as late
    as at `optimizer.step()`, with a gradient of the parameters before it: use `until_finished`, or call `take_awaited()` before
    each batch.

    After `optimizer.step()` call `synchronize()` before you write to the parameters yourself (a new head, `load_state_dict`,
    clipped weights, an average swapped in for a validation). In modes "blocking" and "forward" the outcome would undo what is
    written while it is waited for: a ConfigError at the next forward. A write by `parameter.data` is lost unnoticed; of an
    average swapped in so, the weights that come back are without the outcome and count twice. A step hook that writes (a
    mask, a clamp) is registered before entering, so that it runs before the contribution. While adapters are merged into
    their base for a validation (PEFT's `merge_adapter`; layers with frozen and trained parameters and a boolean `merged`),
    forwards take no outcome, and whatever would move the adapters is a ConfigError.

    A copy of the model (`copy.deepcopy`, `AveragedModel`, `torch.save`) is a plain model. A torch optimizer of the model that
    was not given is not counted; what it does before `optimizer.step()` is part of that step, what it does after it of the next
    contribution. If it takes the steps of two contributions, and at least 200, before the given one takes any (the optimizer
    inside SAM), or between two of them (an optimizer made anew in the loop), that is a ConfigError.

    A model sharded over the ranks of a torchrun job (`fully_shard`, `parallelize_module`; call them before) is one peer: every
    rank makes the same calls.

    Args:
        model: also as accelerate's `prepare`, Fabric's `setup`, DistributedDataParallel or torch.compile have wrapped it.
        optimizer: what trains it, wrapped or not. Several, as Muon for the matrices and AdamW for the rest: the last one's
            `step()` ends an inner step. Within a backward (one for each parameter, which a hook steps as soon as its gradient
            is there) the inner step ends with that backward. None that writes its own copy of the parameters into them: that
            undoes merges. If each step does (fp32 master weights), a warning says so after three merges; not of Lookahead. Of
            one that wraps another and runs step hooks of its own, what it writes after the inner step counts, too.
        collective: this peer's connection to the run; a CompositeCollective where the run has several aggregators.
        config: `WorkerConfig.of(run)`.
        ranks: of this replica; None: all of torch.distributed's when the model is sharded, or in DistributedDataParallel; else
            alone. They must be those that the collective was connected for: of `peers.connect` by default all of
            torch.distributed's, so a loop that averages gradients itself gives `Ranks.world()` (`edit.replica.ranks`).
        clock: monotonic seconds in float64, for the speed that is reported and, at rank 0, for a run's schedule by time; None:
            the system's.
        leave: what the model holds after leaving, and as soon as `finished` is True after an optimizer step: "outer", the outer
            parameters, which all peers share; or "local", this peer's own. An exception that leaves the `with` leaves the
            local ones, and gives up a contribution that waits for its outcome.

    Once left, it still says what it was, by its properties, `outer_of`, `outer_parameters` and `outer_state_dict`; what trains
    on or saves is a LocalProtocolError. Save `state_dict()` before the `with` ends, also after an exception.

    Raises ConfigError for a wrapper that hides the parameters and an optimizer without step hooks, on entering also when the
    ranks do not fit together, the model is on several GPUs in one process, or the optimizer trains no parameter of it;
    RefusedError on entering when the model does not fit the run; EvictedError out of the loop's own forward or step when the
    operator evicted this peer.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        collective: Collective | CompositeCollective,
        config: WorkerConfig,
        ranks: Ranks | None = None,
        clock: Callable[[], float] | None = None,
        *,
        leave: Literal["outer", "local"] = "outer",
    ) -> None:
        one_of("leave", leave, ("outer", "local"))
        _check_config(config)
        self._model = innermost_model(model)
        self._optimizers = innermost_optimizers(optimizer)
        self._device = _device_name(self._model)
        self._collectives = shares_of(collective)
        self._clip, self._reached = 0.0, 0
        if isinstance(collective, CompositeCollective):
            self._clip, self._reached = collective.clip, collective.reached
        self._config = config
        self._run_config = config_of(collective)
        self._leaves_outer = leave == "outer"
        together = is_sharded(self._model) or is_replicated(model)
        self._ranks = ranks if ranks is not None else Ranks.world() if together else ALONE
        self._clock = clock if clock is not None else time.monotonic
        self._exchanges: tuple[ShareExchange, ...] = ()  # one for each aggregator; none before entering
        self._checkpoints: tuple[Checkpoint, ...] = ()
        self._half_entered = False  # whether entering failed once the checkpoints had begun to move the model
        self._hooks: list[RemovableHandle] = []
        self._update_points: list[dict[nn.Module, tuple[int, ...]]] = []  # by share
        self._swapped = False
        self._speed, self._stopwatch = Speed(), Stopwatch(self._clock)
        self._waited = (0, 0.0, 0.0)  # the outer step, what was paused before it, and within it
        self._ended = False  # whether the run had finished and the model was given what `leave` says
        self._exchanged: frozenset[int] = frozenset()  # the ids of the parameters
        self._foreign = ForeignParameters(self._optimizers, ())
        self._buffers = LocalBuffers(nn.Module())  # of the model, from entering on
        self._stepped = False  # whether the optimizer whose step ends an inner step ever was
        self._backward = -1  # the last one in which an inner step ended
        self._other_steps: dict[int, int] = {}  # since then, of the other optimizers, by id
        self._written_before: list[
            int
        ] = []  # how often the parameters were, by fragment, before the step of one that wraps another
        self._trainers = WeakSet(self._optimizers)  # of the model: these, and those that were seen to step

    def __enter__(self) -> Self:
        if self._hooks:
            raise LocalProtocolError("this EditWorker is already entered")
        if self._half_entered and not self._checkpoints:
            raise LocalProtocolError(
                "entering this EditWorker failed after its state had moved the model: load the state of the model, of the "
                "optimizer and of the worker once more, and make the connection of peers.connect anew"
            )
        before = self._exchanges
        try:
            self._enter()
        except BaseException:
            self._remove_hooks()
            self._exchanges = before
            raise
        self._half_entered = False
        return self

    def _enter(self) -> None:
        self._ranks.together(self._check_ranks)
        self._ranks.together(self._check_run)
        self._check_private()
        kernels.load()
        with _outside_autograd():
            replicas = self._new_replicas()
            _refuse_merged(replicas[0], "entering the EditWorker")
            if not self._checkpoints:  # whoever resumes takes the run's buffers where its own have diverged
                self._refuse_bad_buffers(replicas)
            tensors = [tensor for replica in replicas for fragment in replica.layout.tensors for tensor in fragment]
            self._exchanged = frozenset(map(id, tensors))
            refuse_foreign(self._optimizers, tensors, self._ranks)
            self._foreign = ForeignParameters(self._optimizers, tensors)
            self._buffers = LocalBuffers(self._model, self._exchanged)
            self._exchanges = tuple(
                ShareExchange(
                    replica,
                    collective,
                    self._trainers,
                    self._config,
                    self._clock,
                    alone=len(replicas) == 1,
                    buffers=self._buffers,
                    clip=self._clip,
                )
                for replica, collective in zip(replicas, self._collectives, strict=True)
            )
            joined = join_all(self._exchanges, self._collectives, self._checkpoints, self._reached)
            checkpoints, self._checkpoints = self._checkpoints, ()  # once they have moved the model they are used up
            self._half_entered = bool(checkpoints)
            begin_all(self._exchanges, checkpoints, joined)
        forward = self._config.sync.mode == "forward"
        self._update_points = [replica.modules.update_points() if forward else {} for replica in replicas]
        modules = dict.fromkeys([self._model, *(module for update_points in self._update_points for module in update_points)])
        for hook in self._registered(modules):
            self._hooks.append(hook)
        self._warn_foreign()
        self._tell()  # a peer that is where the run is, is waited for

    def _registered(self, modules: Iterable[nn.Module]) -> Iterator[RemovableHandle]:
        """Register one hook after the other."""
        # A compiled step breaks its graph here: an exchange cannot be traced.
        eager: Callable[[Callable[..., None]], Callable[..., None]] = torch.compiler.disable
        yield register_optimizer_step_pre_hook(Hook(eager(self._before_any_step)))
        for optimizer in self._optimizers:
            yield optimizer.register_step_pre_hook(Hook(eager(self._before_step)))
        yield self._optimizers[-1].register_step_post_hook(Hook(eager(self._after_step)))
        for module in modules:
            yield module.register_forward_pre_hook(Hook(self._before_forward), prepend=True)

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self._refuse_half_moved()
                with _outside_autograd():
                    if not self._ended and (self._leaves_outer or not self.finished):
                        self._exchanges[0].replica.refuse_replaced()
                        self._ranks.together(lambda: self._refuse_merged("leaving the EditWorker"))
                    for each in self._exchanges:
                        each.leave()
                    if self._leaves_outer:
                        self._load_outer()
        finally:
            self._remove_hooks()
            for each in self._exchanges:
                each.run(each.exchange.drop_pending())

    def _new_replicas(self) -> list[Replica]:
        self._ranks.same("the worker's configuration", self._config)
        self._ranks.same("the largest norm of a contribution (protect.clip)", self._clip)
        count = len(self._collectives)
        replicas = [Replica(self._model, self._ranks, self._config.buffers, (number, count)) for number in range(count)]
        refuse_small_shares(replicas, self._config.sync.groups)
        self._config.codec.check_fragments([f.name for one in replicas for f in one.schema.fragments if not f.buffers])
        if self._config.sync.mode == "forward":
            replicas[0].modules.refuse_prefetch()
        return replicas

    def _refuse_bad_buffers(self, replicas: Sequence[Replica]) -> None:
        """Raise ConfigError at every rank for a buffer that is exchanged and not finite: no contribution with it is merged."""
        layouts = [replica.layout for replica in replicas]
        bad = [
            fragment.tensors[box.tensor].name
            for layout in layouts
            for i, fragment in enumerate(layout.schema.fragments)
            if fragment.buffers
            for box, held in zip(layout.held[i].boxes, layout.locals(i), strict=True)
            if not bool(held.isfinite().all())
        ]
        if names := [name for of_rank in self._ranks.collect(bad) for name in of_rank]:
            raise ConfigError(
                f'buffers = "{self._config.buffers}": {names[0]} is not finite, and no mean of it is; register it with '
                'persistent=False if it is constant, such as a mask, or set buffers = "local"'
            )

    # What the user sees.

    @property
    def outer_step(self) -> int:
        """The committed outer step of theta; of several shares, that of the furthest."""
        return self._furthest.replica.outer_step

    @property
    def digest(self) -> str:
        """Digest of theta; equal on all peers at the same outer step (of all shares), whatever the number of aggregators."""
        replicas = [each.replica for each in self._entered]
        return replicas[0].digest if len(replicas) == 1 else combine(one for replica in replicas for one in replica.hashes)

    @property
    def shares(self) -> tuple[AggregatorShare, ...]:
        """Where the fragments of each aggregator stand, by aggregator; before entering none."""
        return tuple(map(AggregatorShare.of, self._exchanges))

    def outer_of(self, share: int = 0) -> tuple[Schema, Outer]:
        """Return theta of one aggregator's fragments as this rank holds it, and which they are.

        What was returned once stays as it is: the next commit is written elsewhere, one fragment after the other.
        """
        replica = self._entered[share].replica
        return replica.schema, replica.outer

    @property
    def finished(self) -> bool:
        """Whether the run has reached its last outer step; optimizer steps then no longer lead to contributions."""
        return bool(self._exchanges) and all(each.exchange.finished for each in self._exchanges)

    @property
    def inner_steps(self) -> int:
        """Optimizer steps since entering, and those before the checkpoint that was loaded."""
        return self._exchanges[0].exchange.schedule.inner_steps if self._exchanges else 0

    @property
    def round_inner_steps(self) -> int:
        """Optimizer steps since the last contribution of any share."""
        return min((each.exchange.schedule.round_inner_steps for each in self._exchanges), default=0)

    @property
    def pending(self) -> bool:
        """Whether a contribution waits for its outcome."""
        return any(each.exchange.pending is not None for each in self._exchanges)

    @property
    def last_commit(self) -> Commit | None:
        """The commit applied last, with every peer's verdicts, without its payloads; None before the first.

        Of several shares, that of the furthest.
        """
        return self._furthest.last_commit if self._exchanges else None

    @property
    def last_reason(self) -> str:
        """Why the last attempt ended as it did: the commit's reason, or why a round was lost or a snapshot taken."""
        return self._furthest.exchange.last_reason if self._exchanges else ""

    @property
    def last_verdict(self) -> Verdict | None:
        """The worst verdict on this peer's fragments in `last_commit`; None: it is not part of it."""
        if (commit := self.last_commit) is None:
            return None
        own = [each for fragment in commit.fragments if (each := fragment.verdict_of(self._collectives[0].peer_id))]
        return next((each.verdict for each in own if each.verdict is not Verdict.OK), Verdict.OK) if own else None

    @property
    def wait_s(self) -> float:
        """For how many seconds training stood still for the exchange, from the last outer step but one to the last."""
        return self._waited[2]

    def until_finished(self, data: Iterable[_Batch], *, epoch: int = 0, skip: int = 0) -> Iterator[_Batch]:
        """Yield the batches of `data` until the run has finished; take its last outcome before another batch is trained on.

        After the loop the model holds what `leave` says. In a replica of several ranks all of them end after the same step.
        After each 10,000 batches without a step of the given optimizer it looks whether the run has ended meanwhile, and
        applies what is known.

        Args:
            data: begun again after its last batch (a DataLoader, a list; `set_epoch` of it, its dataset, its sampler and its
                batch sampler is called with the number of the pass), unless it is an iterator: the loop then ends with it.
            epoch: the number of the first pass, for a loop that goes on from a checkpoint.
            skip: how many batches of the first pass are left out: those that were trained on before. They are loaded. Use it in
                place of accelerate's `skip_first_batches`, whose loader leaves them out in every pass.

        Raises ConfigError when data has no batch, fewer than `skip`, or leaves out batches itself; EvictedError.
        """
        steps, idle = -1, 0
        for batch in agreed(epochs(data, epoch, skip), self._ranks, one_pass=isinstance(data, Iterator)):
            self._take_awaited()
            steps, idle = self.inner_steps, idle + 1 if steps == self.inner_steps else 0
            if idle and idle % _IDLE_BATCHES == 0 and not self._over:
                self._look_on()
            if self._over:
                break
            yield batch
        with _outside_autograd():
            if self._over:
                self._end()

    def take_awaited(self) -> None:
        """Take an outcome that the next forward would wait for, before it: for a loop that may be told to stop in the wait.

        In mode `forward` its updates are still applied, and waited for, as the forward needs them. That of the last outer step
        is taken in every mode, once there is nothing to train for meanwhile.
        """
        self._require_local("take_awaited()")
        if self.pending:
            self._refuse_merged("take_awaited()")
        self._take_each(lambda each: each.take(lazily=self._config.sync.mode == "forward"))

    def _take_awaited(self) -> None:
        """Take an outcome that the next forward would wait for at once, or after which there is nothing to train for."""
        if self.pending:
            self._refuse_merged("another batch of until_finished()")
        self._take_each(lambda each: each.take() if self._config.sync.mode == "blocking" else None)

    def _take_each(self, take: Callable[[ShareExchange], object]) -> None:
        """Take what is awaited at each share; where there is nothing to train for meanwhile, wait for the last outcome."""
        before = self._reached_steps
        with _outside_autograd(), self._stopwatch.paused():
            over = self._nothing_to_train
            for each in self._inside:
                if over and each.exchange.pending is not None:
                    each.synchronize()
                else:
                    take(each)
            if self._reached_steps != before:
                self._tell()  # no step may follow that would

    @property
    def _nothing_to_train(self) -> bool:
        """Whether each share is over, or waits for the outcome of its last outer step."""
        last = self._config.sync.outer_steps

        def over(share: ShareExchange) -> bool:
            reached = share.replica.outer_step + (share.exchange.pending is not None)
            return share.exchange.finished or reached >= last

        return all(map(over, self._entered))

    def _look_on(self) -> None:
        """Learn what the run has done while nothing here led to a contribution."""
        self._exchanges[0].replica.refuse_changes()
        self.synchronize(block=False)

    @property
    def _over(self) -> bool:
        last = self._config.sync.outer_steps
        return all(each.exchange.finished or each.replica.outer_step >= last for each in self._entered)

    def _check_ranks(self) -> None:
        """Raise ConfigError where the connection was made for another number of ranks: each would send what is not its part."""
        size = self._ranks.size
        for connected in map(ranks_of, self._collectives):
            if connected is not None and connected != size:
                raise ConfigError(
                    f"ranks: the connection to the run was made for {connected} ranks of one peer, this EditWorker for {size}: "
                    + (_GIVE_ALL if connected > size else _CONNECT_ALL)
                )

    def _check_run(self) -> None:
        """Raise ConfigError where the settings are not those of the run, as far as the connection knows them."""
        if self._run_config is not None:
            self._config.refuse_other(self._run_config)

    def _check_private(self) -> None:
        """Raise ConfigError where the run asks for gradients with noise and this loop has none."""
        trained = (parameter for parameter in self._model.parameters() if parameter.requires_grad)
        if self._config.private and not all(hasattr(parameter, "grad_sample") for parameter in trained):
            raise ConfigError(
                'privacy.level = "example": this loop has no private gradients, and would send what has no noise: make '
                "edit.integrations.opacus.PrivateGradients of the model before the EditWorker"
            )

    def report(self, *, loss: float | Tensor | None = None, tokens: int = 0, **metrics: float | Tensor) -> None:
        """Say how the inner step now taken went, once for each: the run's status shows it from the next step on, with this
        peer's speed.

        loss: of this step; a tensor is read one step later, so that nothing waits for the device. tokens: see `count_tokens`.
        metrics: other numbers by name (`accuracy=0.5`), the last value of each; `status --json` shows them, to those who may
            see the loss.

        Raises ConfigError for a name of more than 64 characters, for more than 32 names, and for a tensor of several elements.
        """
        self._speed.add_metrics(metrics)
        if loss is not None:
            self._speed.add_loss(loss)
        if tokens:
            self.count_tokens(tokens)

    @property
    def speed(self) -> Speed:
        """Loss and speed of the last inner steps, without the time in which this worker exchanged or waited."""
        return self._speed

    def count_tokens(self, tokens: int) -> None:
        """Add to the tokens behind the next contribution (they weigh it when the run says `weighting = "tokens"`).

        They are the whole replica's, so every rank adds the same.
        """
        inside = self._inside
        self._speed.count_tokens(tokens)
        for each in inside:
            each.exchange.schedule.count_tokens(tokens)

    def count_steps(self, steps: int) -> None:
        """Add to the inner steps behind the next contribution, of a model that something else has trained so far.

        Nothing is exchanged before the next optimizer step. Every rank adds the same.
        """
        for each in self._inside:
            each.exchange.schedule.count_steps(steps)

    def synchronize(self, *, block: bool = True) -> bool:
        """Wait for the pending outcome and apply it, and every commit already known. False when the carrier is cut off.

        Call it before your loop writes to the parameters, or swaps others in (`EMAModel.store`, `copy_to`, `restore`). Raises
        ConfigError where that was done since the contribution, in modes "blocking" and "forward".

        block: False applies what is known and does not wait; an outcome that is still open is asked for after later steps.
        """
        self._require_local("synchronize()")
        self._refuse_merged("synchronize()")
        with _outside_autograd(), self._stopwatch.paused():
            before = self._reached_steps
            known = [each.synchronize(block=block) for each in self._inside]
            if self._reached_steps != before:
                self._tell()
        return all(known)

    @property
    def residuals(self) -> dict[int, Tensor]:
        """What the codec has left out of this rank's contributions, by fragment, shared; later commits write into it."""
        return {i: residual.tensor for i, residual in self._one_share.feedback.residuals().items()}

    def load_residuals(self, residuals: Mapping[int, Tensor]) -> None:
        """Go on with what `residuals` gave, while nothing is pending. Raises StorageError when it does not fit."""
        self._one_share.feedback.load(residuals)

    @contextmanager
    def outer_parameters(self) -> Iterator[nn.Module]:
        """The model with theta in it, for evaluating or saving; afterwards the local parameters are back to the bit.

        No exchange and no waiting inside; an optimizer step or `state_dict()` inside is a LocalProtocolError. Of an outer step
        of which only a part is applied (mode `forward`) the rest is first, at all ranks; once an exception has left the `with`,
        nothing more is applied, and the fragments then stay of two outer steps. Adapters must not be merged before it,
        nor at its end (ConfigError): merge and unmerge them inside. Do not call `eval()` or `train()` of a schedule-free
        optimizer inside (ConfigError where its mode differs at the end).
        """
        self._require_local("outer_parameters()")
        _refuse_merged(self._entered[0].replica, "outer_parameters()")
        self._apply_rest()
        with _outside_autograd():
            kept = [each.replica.load_outer() for each in self._entered]
        modes = _train_modes(self._optimizers)
        self._swapped = True
        try:
            yield self._model
            _refuse_merged(self._entered[0].replica, "the end of outer_parameters()")
            if _train_modes(self._optimizers) != modes:
                raise ConfigError(
                    "the optimizer's eval() or train() within outer_parameters(): it moved the outer parameters, and the next "
                    "one would move the local ones as if it had moved them; call neither there"
                )
        finally:
            self._swapped = False
            with _outside_autograd():
                for each, copies in zip(self._entered, kept, strict=True):
                    each.replica.restore(copies)

    def outer_state_dict(self) -> dict[str, Tensor]:
        """Return theta by tensor name: fp32 CPU copies in full shape of all that is exchanged (nothing frozen).

        In a replica of several ranks all of them call it; rank 0 gets the tensors, the others an empty dictionary. Of an outer
        step of which only a part is applied, as `outer_parameters`.
        """
        self._apply_rest()
        with _outside_autograd():
            return {name: theta for each in self._entered for name, theta in each.replica.outer_state_dict().items()}

    def _apply_rest(self) -> None:
        if not self._swapped and any(each.exchange.applying for each in self._entered):
            self._refuse_merged("the outer parameters of an outer step that is partly applied")
            with _outside_autograd(), self._stopwatch.paused():
                for each in self._entered:
                    each.apply_rest()

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Return what this worker needs to go on, for torch.distributed.checkpoint (see `edit.worker.checkpoint`).

        Changes nothing (T8). Before the `with` ends: leaving by an exception gives up a contribution that waits for its
        outcome, and what was left of it could not be told from work that was never sent. Not inside `outer_parameters()`,
        where the model does not hold the local parameters that belong to it.

        The model's and the optimizer's own state are the caller's. The tensors are shared, not copied: do not write into them.
        All ranks call it together.
        """
        self._require_local("state_dict()")
        with _outside_autograd():
            return joint_state(self._inside)

    def empty_state(self, kinds: Collection[str], scalars: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
        """Tensors laid out as the model is, for torch.distributed.checkpoint to load into. Before entering.

        kinds: keys of `state_dict`, but for "scalars"; those are of the state that will be loaded. Those that it has not are
        left out. Where the scalars were saved apart, as JSON:

            state = worker.empty_state(worker.kinds_needed(scalars, 0), scalars)
            dcp.load(state, checkpoint_id=folder)
            worker.load_state_dict(state | {"scalars": scalars})

        Raises ConfigError for a kind that does not exist, StorageError for damaged scalars.
        """
        states = separate_states({"scalars": scalars}, len(self._collectives))
        with _outside_autograd():
            skeletons = [
                skeleton(replica, kinds, state["scalars"]) for replica, state in zip(self._new_replicas(), states, strict=True)
            ]
        joint = {kind: {name: empty for each in skeletons for name, empty in each[kind].items()} for kind in kinds}
        return {kind: tensors for kind, tensors in joint.items() if tensors}

    def kinds_needed(self, scalars: Mapping[str, Any], run_step: int) -> frozenset[str]:
        """Return which kinds of tensors, beside "scalars", `load_state_dict` needs of the state with these scalars, in a run
        that has reached this outer step. Unless they are all (`edit.worker.checkpoint.KINDS`), the worker begins with the
        run's parameters, and the model's local ones do not matter. `empty_state` leaves out those that this state has not.

        Before entering. Raises StorageError when the scalars are damaged.
        """
        states = separate_states({"scalars": scalars}, len(self._collectives))
        with _outside_autograd():
            schemas = [replica.schema for replica in self._new_replicas()]
        kinds = (
            kinds_needed(self._config, state["scalars"], run_step, schema.fragments)
            for state, schema in zip(states, schemas, strict=True)
        )
        return frozenset[str]().union(*kinds)

    def load_state_dict(self, state: Mapping[str, Any], *, forward: bool = False) -> None:
        """Go on from what `state_dict` gave, on any layout of ranks; before entering, with the model's local parameters loaded.

        forward: only the kinds of tensors that `kinds_needed` names are given, and not all are; nor were the local parameters
        loaded. Raises StorageError when it is damaged or does not fit.
        """
        if self._hooks:
            raise LocalProtocolError("load_state_dict() after entering: load before `with EditWorker(...)`")
        with _outside_autograd():
            replicas = self._new_replicas()
            states = separate_states(state, len(replicas))
            self._checkpoints = tuple(
                Checkpoint.read(replica, each, forward=forward) for replica, each in zip(replicas, states, strict=True)
            )

    # The hooks.

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling() or self._swapped or not self.pending or self._exchanges[0].replica.modules.merged():
            return
        self._refuse_half_moved()
        with _outside_autograd(), self._stopwatch.paused():
            for each, update_points in zip(self._exchanges, self._update_points, strict=True):
                if each.exchange.pending is not None:
                    each.take(lazily=self._config.sync.mode == "forward")
                    each.apply_fragments(update_points.get(module, ()))

    def _before_any_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called for every optimizer in this process: another one of the same parameters is about to change them."""
        if any(optimizer is own for own in self._optimizers) or not any(
            id(parameter) in self._exchanged for group in optimizer.param_groups for parameter in group["params"]
        ):
            return
        self._require_local("optimizer.step()")
        self._trainers.add(optimizer)
        self._exchanges[0].replica.modules.before_step()
        self._refuse_uncounted(optimizer)
        self._keep_local()

    def _keep_local(self) -> None:
        """A step is about to be taken that takes no outcome first."""
        with _outside_autograd():
            for each in self._exchanges:
                each.keep_local()

    def _refuse_uncounted(self, optimizer: Optimizer) -> None:
        """Raise ConfigError when this one trains, but the one whose step ends an inner step does not: nothing would be sent."""
        if optimizer is self._optimizers[-1]:
            return
        steps = self._other_steps[id(optimizer)] = self._other_steps.get(id(optimizer), 0) + 1
        allowed = max(_STEPS_OF_OTHERS, 2 * max(each.exchange.schedule.every for each in self._exchanges))
        if steps > allowed and not self.finished:
            given = any(optimizer is own for own in self._optimizers)
            words = _last_not_stepped if given else _no_longer_stepped if self._stepped else _not_stepped
            raise ConfigError(words(self._optimizers[-1], optimizer))

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._require_local("optimizer.step()")
        self._exchanges[0].replica.modules.before_step()
        self._refuse_uncounted(optimizer)
        if in_backward():
            self._keep_local()
        else:
            self._take_rest()
        with _outside_autograd():
            for each in self._exchanges:
                each.undone_merges.before_step()
        if wrapped(optimizer) is not None:
            self._written_before = self._written()

    def _take_rest(self) -> None:
        """Take what no forward has taken."""
        self._refuse_merged("optimizer.step()")
        with _outside_autograd(), self._stopwatch.paused():
            for each in self._exchanges:
                each.before_step()

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._stepped, skipped = True, self._skipped(optimizer)
        self._other_steps.clear()
        if skipped:
            return
        self._refuse_half_moved()
        for each in self._exchanges:
            each.undone_merges.after_step()
        if in_backward():
            self._backward = after_backward(self._end_backward, self._backward)
        else:
            self._end_inner_step()

    def _end_backward(self) -> None:
        """A backward in which an inner step ended is over: nothing reads the parameters of its forward any more."""
        self._take_rest()
        self._end_inner_step()

    def _end_inner_step(self) -> None:
        self._speed.add_step(self._stopwatch.lap())
        with _outside_autograd(), self._stopwatch.paused():
            for each in self._exchanges:
                each.exchange.schedule.count_steps()  # at all shares, before one waits
            ready = [each.run(each.exchange.stepped(0)) for each in self._exchanges]
            if all(ready):
                self._contribute_if_due()
            if self.finished:
                self._end()
            self._tell()
        if self.outer_step != self._waited[0]:
            paused_s = self._stopwatch.all_paused_s
            self._waited = (self.outer_step, paused_s, paused_s - self._waited[1])

    def _skipped(self, optimizer: Optimizer) -> bool:
        """Whether this step did nothing.

        To a fused optimizer GradScaler leaves it to skip one whose gradients overflowed. One that wraps another may leave out
        its steps, to accumulate gradients.
        """
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None:
            return self._ranks.all([bool(found_inf)])[0]
        inside = wrapped(optimizer)
        if inside is None or id(inside) in self._other_steps:
            return False
        return self._ranks.all([self._written() == self._written_before])[0]

    def _written(self) -> list[int]:
        return [each.replica.version(i) for each in self._exchanges for i in range(len(each.replica.schema.fragments))]

    @property
    def _reached_steps(self) -> list[int]:
        return [each.replica.outer_step for each in self._exchanges]

    def _tell(self) -> None:
        """Tell each aggregator how far this peer is."""
        for each, collective in zip(self._exchanges, self._collectives, strict=True):
            schedule = each.exchange.schedule
            collective.report(
                Progress(
                    outer_step=each.replica.outer_step,
                    digest=each.replica.digest,
                    exchanging=each.exchange.pending is not None,
                    inner_steps=schedule.inner_steps,
                    round_inner_steps=schedule.round_inner_steps,
                    loss=self._speed.loss,
                    tokens_per_s=self._speed.tokens_per_s,
                    step_s=self._speed.step_s,
                    device=self._device,
                    metrics=self._speed.metrics,
                )
            )

    def _contribute_if_due(self) -> None:
        if not self.finished:
            self._exchanges[0].replica.refuse_changes()
        contributed = [each.run(each.exchange.contribute_if_due()) for each in self._exchanges]
        if any(contributed):
            self._buffers.keep()
            self._exchanges[0].replica.warn_frozen()
            self._warn_foreign()
            self._reset_finished()

    def _warn_foreign(self) -> None:
        if self._ranks.leads:
            self._foreign.warn()

    def _end(self) -> None:
        """Training in this run is over: the model holds what `leave` says, whatever follows until `with` is left."""
        if self._ended:
            return
        if self._leaves_outer:
            self._refuse_merged("the end of the run")
        self._ended = True
        if self._leaves_outer:
            self._exchanges[0].replica.refuse_replaced()
            self._load_outer()

    def _refuse_merged(self, call: str) -> None:
        """Raise ConfigError while an adapter is merged; after the end of the run that is the user's."""
        if not self._ended:
            _refuse_merged(self._entered[0].replica, call)

    def _load_outer(self) -> None:
        for each in self._exchanges:
            each.replica.reload(lambda _: None)

    def _reset_finished(self) -> None:
        """Move the share of a finished run back to theta: its parameters are still trained along with the others'."""
        for replica in (each.replica for each in self._exchanges if each.exchange.finished):
            replica.reload(lambda _: None)

    @property
    def _entered(self) -> tuple[ShareExchange, ...]:
        if not self._exchanges:
            raise LocalProtocolError("enter the EditWorker first: with EditWorker(...) as worker:")
        return self._exchanges

    @property
    def _inside(self) -> tuple[ShareExchange, ...]:
        """As `_entered`, of a worker that was not left. Raises LocalProtocolError."""
        if self._exchanges and not self._hooks:
            raise LocalProtocolError("this EditWorker was left: train, and save its state_dict(), before its `with` ends")
        self._refuse_half_moved()
        return self._entered

    def _refuse_half_moved(self) -> None:
        """Raise LocalProtocolError where an exception, such as Ctrl-C, came while an outer step was being applied."""
        if any(each.half_moved for each in self._exchanges):
            raise LocalProtocolError(
                "this EditWorker was interrupted while an outer step was being applied: its parameters and its state do not "
                "belong together; go on from what was saved before"
            )

    @property
    def _one_share(self) -> ShareExchange:
        if len(self._entered) > 1:
            raise LocalProtocolError("the residuals of several shares are in state_dict() only")
        return self._entered[0]

    @property
    def _furthest(self) -> ShareExchange:
        return max(self._entered, key=lambda each: each.replica.outer_step)

    def _require_local(self, call: str) -> None:
        if self._swapped:
            raise LocalProtocolError(f"{call} inside outer_parameters(): the model holds the outer parameters there")


def _check_config(config: object) -> None:
    if isinstance(config, RunConfig):
        raise ConfigError("config: must be a WorkerConfig, not a RunConfig: write WorkerConfig.of(run)")
    if not isinstance(config, WorkerConfig):
        raise ConfigError(f"config: must be a WorkerConfig, not a {type(config).__name__}: write WorkerConfig.of(run)")


@contextmanager
def _outside_autograd() -> Iterator[None]:
    """No graph, no inference tensors even when the user evaluates under torch.inference_mode(), and no transform of torch.func:
    a tensor made within `grad` or `vmap` has no memory to read. What the forward then reads are the merged parameters."""
    with temporarily_clear_interpreter_stack(), torch.inference_mode(False), torch.no_grad():
        yield


def _refuse_merged(replica: Replica, call: str) -> None:
    if (name := replica.modules.merged()) is not None:
        raise ConfigError(
            f"{call} while the adapter {name} is merged into its base: it would change what unmerging subtracts, "
            "and the base could stay damaged; unmerge first (PEFT: model.unmerge_adapter(); loralib: merge_weights=False)"
        )


def _train_modes(optimizers: Iterable[Optimizer]) -> list[object]:
    """Return whether schedule-free optimizers have their training parameters in the model; None of others."""
    return [
        mode
        for optimizer in optimizers
        for mode in (getattr(optimizer, "train_mode", None), *(group.get("train_mode") for group in optimizer.param_groups))
    ]


def _not_stepped(given: Optimizer, stepped: Optimizer) -> str:
    name = next((f" (its `{name}`)" for name, value in vars(given).items() if value is stepped), "")
    return (
        f"optimizer: the {type(given).__name__} that was given is not stepped, but {type(stepped).__name__}{name} trains its "
        "parameters: give that one"
    )


def _no_longer_stepped(given: Optimizer, stepped: Optimizer) -> str:
    return (
        f"optimizer: the {type(given).__name__} that was given is no longer stepped, but another {type(stepped).__name__} "
        "trains its parameters: change its settings in place, or leave and enter an EditWorker with the new one"
    )


def _last_not_stepped(last: Optimizer, stepped: Optimizer) -> str:
    return (
        f"optimizer: the last of those that were given, {type(last).__name__}, ends an inner step, but is not stepped, while "
        f"{type(stepped).__name__} is: give one that is stepped in every inner step last"
    )


def _device_name(model: nn.Module) -> str:
    """Return what the model is on, in words."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
