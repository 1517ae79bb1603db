"""One part of the model at one member of a swarm, and the council's effects carried out.

Order of the writes: a held update is in the journal, synced, before anybody hears of it. It is a commit without a digest after
it (`aggregator.storage.journal`, rule 7). Adopting applies it and notes the digest; a kill in between leaves it held, and the
council, whose record names it, adopts it again. So a restart needs nothing but the journal and the council's record.

With an audit log an update has the commit's entry, signed by its owner. A member computes what it can of it, and holds no
update whose entry says something else; then it appends the entry to its own log when it adopts the update.

Called by one thread. Nothing here waits for another member: a `Source` answers, or raises.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from blake3 import blake3
from torch import Tensor

from aggregator.data.round_runner import commit_tokens, weighted_tokens
from aggregator.storage.store import Entries, Store, peaks_from
from aggregator.swarm.engine_store import EngineStore, Proposal
from aggregator.swarm.enrolments import Enrolments, UnclearKeyError
from aggregator.swarm.offers import Offer, Round
from aggregator.swarm.owner_entries import computed
from aggregator.swarm.verification import Contributed
from edit.config.run import RunConfig
from edit.council.events import Adopt, Applied, Failed, Fetch, Held, Hold
from edit.council.record import MOST_COUNT, PartState, Update
from edit.errors import EditError, GoneError, LocalProtocolError, OutdatedError, RemoteProtocolError, StorageError
from edit.fragments.schema import Schema
from edit.merging.outer_state import MergeRecord, OuterState, Staged
from edit.plain_text import parse_json
from edit.records import Commit
from editpb.audit_log import RoundFacts, Signed
from editpb.limits import one_line
from editpb.part_entries import EntryFault, ExpectedEntry, check_entry, named_signatures
from editpb.signed_contributions import config_digest, verified_by_others

__all__ = ["Claimed", "Fetching", "PartReplica", "PartSnapshot", "Source", "Wanted", "carry_out"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Claimed:
    """What a source says that a part's state is, and what all of it comes to (`PartSnapshot.digest`)."""

    outer_step: int
    name: str
    digest: str


_NOTHING = Claimed(0, "", "")
# Of a source: the update TO this outer step with this id; or None: its snapshot. Of others: whether they came to this state.
Wanted = tuple[int, str] | Claimed | None


@dataclass(frozen=True, slots=True)
class PartSnapshot:
    """The whole state of a part after an outer step. tensors: not shared with the replica that gave it."""

    name: str  # of the state
    tokens: int
    schema: str  # as JSON
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """BLAKE3 of all of it: every member that took the same outer steps comes to the same, by computing.

        Costs as much as reading the state. Raises RemoteProtocolError for what no member has.
        """
        try:
            written = json.loads(json.dumps(self.metadata, allow_nan=False), parse_int=float)  # a plug-in's 1 is another's 1.0
            names = [(name, str(each.dtype), each.numel()) for name, each in sorted(self.tensors.items())]
            text = json.dumps([self.name, self.tokens, written, names], sort_keys=True)
        except (TypeError, ValueError, RecursionError) as error:
            raise RemoteProtocolError(f"a state cannot be read ({error or type(error).__name__})") from error
        found = blake3(text.encode() + b"\n")
        for name, _, _ in names:
            found.update(self.tensors[name].contiguous().view(-1).view(torch.uint8).numpy().data)
        return found.hexdigest()


class _OthersError(RemoteProtocolError):
    """An update was merged for other parameters than are here."""


class _ForkedError(RemoteProtocolError):
    """The state here was agreed on, and is not among those that led to what the record names."""


class Source(Protocol):
    """Another member, to fetch from. Every call ends within a time that the implementation bounds; it may raise EditError."""

    def kept(self, part: int, outer_step: int, update_id: str) -> Offer:
        """Return the update TO this outer step with this id, applied or held. Raises GoneError."""
        ...

    def snapshot(self, part: int) -> PartSnapshot:
        """Return the part's state of now. Raises GoneError when there is none."""
        ...

    def confirm(self, part: int, claimed: Claimed) -> None:
        """Return once enough others say that they came to this state, too.

        Raises RemoteProtocolError when they came to another one, GoneError when they do not say.
        """
        ...


class PartReplica:
    """One part at one member.

    Args:
        store: the part's folder. What it has is recovered at once: StorageError, ConfigError as `Store.recover`.
        on_commit: is told of each outer step that is taken, after it is on disk and in `outer`.
        enrolments: returns what the members have agreed on, as far as it is known here: who owns the part, and whose keys
            count. For a run with an audit log.
    """

    def __init__(
        self,
        run_id: str,
        part: int,
        config: RunConfig,
        store: Store,
        on_commit: Callable[[Commit], None] = lambda _: None,
        enrolments: Callable[[], Enrolments | None] = lambda: None,
    ) -> None:
        self._run_id, self._part, self._config, self._store, self._on_commit = run_id, part, config, store, on_commit
        self._enrolments, self._config_digest = enrolments, config_digest(config)
        self._outer: OuterState | None = None
        self._state = PartState()
        self._held: Round | None = None  # the round of the update that is held
        self._staged: Mapping[int, Staged] = {}  # of that, as far as it was computed to check its entry of the audit log
        self._damaged = False  # the parameters here are not those that the state's name means: only a snapshot helps
        self._contested = False  # see `contested`
        self._engine: EngineStore | None = None
        self._proposed = ""  # the id of what the engine waits for
        self._verifies = verified_by_others(config)
        self._verified = ""  # the id of the update that was verified last
        self._continuous = (-1, 0)  # a grant, and the outer step up to which all that it left out is known here
        self._recover()

    @property
    def state(self) -> PartState:
        """What is on disk, as the council is told."""
        return self._state

    @property
    def outer(self) -> OuterState:
        """The outer state. Raises GoneError when the part is not here yet."""
        if self._outer is None:
            raise GoneError(f"part {self._part} is not here yet")
        return self._outer

    def reason(self) -> str:
        """Return why the round of the last outer step closed, as its owner said; '' where that is not kept: after a snapshot.

        Raises StorageError.
        """
        outer_step = self._state.outer_step
        found = self._store.update(outer_step) or self._store.committed(outer_step)
        return found.reason if found is not None else ""

    @property
    def contested(self) -> bool:
        """Whether the last update that was to be held is for other parameters than are here: one of the two is wrong."""
        return self._contested

    def give_up(self, claimed: Claimed) -> bool:
        """Believe the others, who came to another state of this outer step; return whether it still is the one that is here.

        It is called by its digest from now on: what its name means it is not.
        """
        here = self._state.outer_step, self._state.digest
        if self._state.held is not None or here != (claimed.outer_step, claimed.name) or self._damaged:
            return False
        _log.error("part %d is damaged: others came to another outer step %d", self._part, claimed.outer_step)
        self._damaged, self._state = True, PartState(claimed.outer_step, claimed.digest)
        return True

    def found(self, outer: OuterState) -> None:
        """Write the part's first state. Raises StorageError."""
        self._store.found(outer)
        self._outer, self._state = outer, PartState(0, outer.digest)

    def _recover(self) -> None:
        self._outer, self._held, self._state, self._damaged = self._store.recover(), None, PartState(), False
        self._staged = {}
        self._claimed = _NOTHING  # what the state comes to, as far as it was computed
        if self._outer is None:
            return
        name = self._store.update_id or self._outer.digest
        self._state = PartState(self._outer.outer_step, name)
        if (held := self._store.held) is not None:
            assert held.update is not None
            update = Update(**held.update)
            self._state = PartState(self._outer.outer_step, name, update)
            self._held = Round(held.round_id, held.reason, held.base, held.fragments, held.audit)

    # -- an owner ----------------------------------------------------------------------------------------------------------

    def offer(
        self, grant: int, round_id: int, reason: str, tokens: int, records: Sequence[MergeRecord], audit: str = ""
    ) -> Offer:
        """Return what is offered of a merged round. Changes nothing. tokens: merged with it. audit: see `Round`."""
        ordered = tuple(sorted(records, key=lambda record: record.fragment_id))
        merged = Round(round_id, reason, self.outer.digest, ordered, audit)
        total = min(self._store.tokens + tokens, MOST_COUNT)
        return Offer.of(self._run_id, self._part, grant, self._state.digest, total, merged)

    def serve(self, folder: Path, propose: Callable[[Proposal], None], entries: Entries | None = None) -> EngineStore:
        """Return the store for an engine of this part, which then is the only one that moves its outer state, until `cease`.

        Args:
            propose: takes each merged round, in the engine's worker thread; the caller gives it to `made`, in its own.
            entries: as of an `EngineStore`.
        """
        if self._verifies:
            self.outer.forget_unrecorded()  # those who verify this grant have nothing of it, either
        self._engine = EngineStore(self._store, folder, self._config, self._run_id, propose, entries)
        return self._engine

    def made(self, grant: int, proposal: Proposal) -> Offer:
        """Return what is offered of a round that the engine proposed."""
        offer = self.offer(grant, proposal.round_id, proposal.reason, proposal.tokens, proposal.records, proposal.audit)
        self._proposed = offer.update.id
        return offer

    def refuse(self, update_id: str, reason: str) -> None:
        """Refuse what the engine proposed, if that is this update: nobody else will hear of it."""
        if self._engine is not None and update_id == self._proposed:
            self._proposed = ""
            self._engine.refuse(reason)

    def cease(self, reason: str) -> None:
        """End the engine's store. What it proposed and is held may yet become an outer step."""
        if self._engine is not None:
            self._engine.end(reason)
        self._engine, self._proposed = None, ""

    # -- who verifies ------------------------------------------------------------------------------------------------------

    def verify(self, offer: Offer, contributed: Contributed) -> tuple[MergeRecord, ...]:
        """Merge the contributions to an update once more; return the records, with what they leave out, for `hold`.

        Raises RemoteProtocolError, in one line, when the update is another; GoneError when it cannot be told here.
        """
        update, state, outer = offer.update, self._state, self.outer
        what = f"part {self._part}: the update to outer step {update.outer_step}"
        if (update.outer_step, update.base) != (state.outer_step + 1, state.digest):
            raise GoneError(f"{what} is not the next one any more")
        if update.grant != self._continuous[0]:
            self._continuous = update.grant, state.outer_step
            outer.forget_unrecorded()
        elif self._continuous[1] != state.outer_step:
            raise GoneError(f"{what}: what the updates of this grant left out is not known here")
        theirs = offer.merged(outer)
        if theirs.round_id != contributed.round_id:
            raise RemoteProtocolError(f"{what} is of round {theirs.round_id}, its contributions of {contributed.round_id}")
        if self._store.part_log is not None and named_signatures(theirs.audit.encode()) != contributed.signatures:
            raise RemoteProtocolError(f"{what}: its entry of the audit log names other contributions than it was merged from")
        records = tuple(outer.record(outer.reduce(i, contributed.fragments[i])) for i in outer.due)
        tokens = {one.fragment_id: weighted_tokens(one, contributed.tokens[one.fragment_id]) for one in records}
        mine = Round(theirs.round_id, theirs.reason, outer.digest, records, theirs.audit)  # which `hold` checks
        total = min(self._store.tokens + commit_tokens(outer.schema, tokens), MOST_COUNT)
        again = Offer.of(self._run_id, self._part, update.grant, state.digest, total, mine)
        if again.update != update:
            raise RemoteProtocolError(f"{what} is not what its contributions merge to: {_difference(again, offer)}")
        self._verified = update.id
        return records

    # -- all members -------------------------------------------------------------------------------------------------------

    def hold(self, offer: Offer, own: Sequence[MergeRecord] = (), *, agreed: bool = False) -> None:
        """Write an update to the journal, in place of the one that is held; it is on disk when this returns.

        Args:
            own: the records of the owner, or of who has verified them, with what they leave out.
            agreed: the record names it already. Then nobody's enrolment is compared: it may have changed since.

        Raises RemoteProtocolError for bytes that are no update to the state here, or to other parameters than are here: one of
        the two is wrong, and if an owner is, no quorum may hold it. EntryFault for an entry of the audit log that is not of
        this update, OutdatedError where that cannot be told (UnclearKeyError: nor later). StorageError. After each nothing, or
        what was held before, is held.
        """
        update, state, self._contested = offer.update, self._state, False
        if (update.part, update.outer_step, update.base) != (self._part, state.outer_step + 1, state.digest):
            here = f"part {self._part} is at outer step {state.outer_step} here"
            raise RemoteProtocolError(f"{here}, which an update to {update.outer_step} does not continue")
        offer.check(self._run_id)
        merged = offer.merged(self.outer)
        if merged.theta != self.outer.digest:
            self._contested, self._claimed = True, _NOTHING
            raise _OthersError(f"part {self._part}: the update to outer step {update.outer_step} is for other parameters")
        if own:
            merged = replace(merged, records=tuple(own))
        if update.tokens < self._store.tokens:
            raise RemoteProtocolError(f"part {self._part}: {update.tokens} tokens after {self._store.tokens}")
        staged = self._checked_entry(update, merged, agreed=agreed) if self._store.part_log is not None else {}
        if state.held is not None:
            self._let_go()
        for record in merged.records:
            self._store.begin_fragment(merged.round_id, record).result()
        self._store.hold(merged.round_id, update.outer_step, merged.reason, merged.theta, asdict(update), merged.audit)
        self._held, self._state, self._staged = merged, PartState(state.outer_step, state.digest, update), staged

    def _checked_entry(self, update: Update, merged: Round, *, agreed: bool) -> Mapping[int, Staged]:
        """Check an update's entry of the audit log; return the outer step that was computed for it.

        What an engine here has made it has computed itself. Raises EntryFault, OutdatedError, StorageError.
        """
        assert self._store.part_log is not None
        tree, outer = self._store.part_log.tree, self.outer
        if update.id == self._proposed:
            return {}
        whose, counts = dict[str, str](), None
        if not agreed:
            known = self._enrolments()
            if known is None or known.record.parts[self._part].grant != update.grant:
                raise GoneError(f"part {self._part}: the update to outer step {update.outer_step} is of another grant")
            whose, counts = {"owner": known.record.parts[self._part].owner}, partial(known.counts, update=update)
        staged = outer.stage_all(merged.records, None, {})
        facts = RoundFacts(round_id=merged.round_id, outer_step=update.outer_step, reason=merged.reason)
        says = computed(self._config, self._part, update.grant, outer, merged.records, staged, facts, {})
        fragments = outer.schema.fragments
        expected = ExpectedEntry(
            signed=Signed(self._run_id, outer.schema.schema_hash, self._config_digest),
            tree=tree,
            says={**says, **whose},
            numel={one.fragment_id: fragments[one.fragment_id].numel for one in merged.records},
            counts=counts,
        )
        try:
            check_entry(merged.audit.encode(), expected)
        except (EntryFault, OutdatedError) as error:
            raise type(error)(f"part {self._part}: outer step {update.outer_step}: {error}") from error
        return staged

    def _let_go(self) -> None:
        """Give up what is held."""
        self._held, self._state, self._staged = None, PartState(self._state.outer_step, self._state.digest), {}
        self._store.take_back()

    def adopt(self, update_id: str) -> None:
        """Take the outer step with the update that is held.

        Where the parameters are not those that it was merged for, they stay, and the state gets another name: it is damaged.
        """
        update, merged, outer = self._state.held, self._held, self.outer
        if update is None or merged is None or update.id != update_id:
            raise LocalProtocolError(f"part {self._part} does not hold {update_id[:12]}")
        if self._store.kept is not None and update.id != self._proposed:
            self._store.kept.decided(update.outer_step, merged.round_id, outer.schema)
        if merged.theta != outer.digest:
            found, wanted = outer.digest, merged.theta
            _log.error("part %d is damaged: outer step %d is %.12s, not %.12s", self._part, outer.outer_step, found, wanted)
            self._held, self._state, self._damaged, self._staged = None, PartState(update.outer_step, found), True, {}
            return
        if update.id != self._proposed or self._engine is None or not self._engine.take(update):
            commit = outer.commit(merged.round_id, merged.reason, list(merged.records), None, self._staged)
            self._store.adopted(commit, asdict(update))
        self._held, self._state, self._staged = None, PartState(update.outer_step, update.id), {}
        if update.id == self._verified:
            self._continuous = update.grant, update.outer_step
        if update.outer_step % self._config.storage.checkpoint_every == 0:
            self._checkpoint()
        if (published := self._store.update(update.outer_step)) is not None:
            self._on_commit(published)

    def _checkpoint(self) -> None:
        try:
            self._store.checkpoint(self.outer)
        except StorageError as error:  # the journal goes on
            _log.error("no checkpoint: %s", error)

    def fetching(self, wanted: Fetch) -> Generator[Wanted, Any, None]:
        """Bring the part to an outer step or a later one: by updates where the source keeps them all, else by its snapshot.

        Yields what the source is to be asked for, and is sent what that answers, or thrown its EditError. At most
        `config.kept_updates` of them are in memory. Raises EditError: the part is where it was, or has come nearer.

        The record names the last update, and by it all before. Of a snapshot it names the outer step alone: so others are
        asked what it comes to, before anything of it is taken. A state here that was agreed on, and did not lead there, is
        kept (rule 19 of the council): that is noted on disk, since the source keeps only some updates.
        """
        steps = range(self._state.outer_step + 1, wanted.outer_step + 1)
        other = self._is_whole and self._state.digest != wanted.digest
        if wanted.outer_step < self._state.outer_step or (not steps and other):
            raise self._forked(wanted)
        if wanted.snapshot or self._damaged or self._outer is None or not 0 < len(steps) <= self._config.kept_updates:
            yield from self._replacing(wanted)
            return
        try:
            held, offers = yield from self._leading_to(wanted, steps)
        except GoneError:
            yield from self._replacing(wanted)
            return
        for offer in offers:
            offer.check(self._run_id)  # the hashes of all of them, before the first is taken
        if held is not None:
            self.adopt(held.id)
        for offer in offers:
            try:
                self.hold(offer, agreed=True)
            except (_OthersError, EntryFault) as error:  # a quorum has held it
                _log.error("part %d is damaged: %s", self._part, error)
                self._damaged = True
                yield from self._replacing(wanted)
                return
            self.adopt(offer.update.id)

    def _leading_to(self, wanted: Fetch, steps: range) -> Generator[Wanted, Any, tuple[Update | None, list[Offer]]]:
        """Return the updates that lead to the wanted one: the held one, if it is the first of them, and the source's.

        Their ids are a chain whose end the record names. Raises GoneError when the source does not have them.
        """
        held, offers = self._state.held, list[Offer]()
        for step in reversed(steps):
            following = offers[0].update.base if offers else wanted.update
            if step == steps[0] and held is not None and held.id == following:
                return held, offers
            offer = yield step, following
            if (offer.update.outer_step, offer.update.id) != (step, following):
                raise GoneError(f"{wanted.source} has another outer step {step} of part {self._part}")
            offers.insert(0, offer)
        if offers[0].update.base != self._state.digest:
            for offer in offers:
                offer.check(self._run_id)  # then it is the record that names another history, and not the source
            raise self._forked(wanted)
        return None, offers

    @property
    def _is_whole(self) -> bool:
        return self._outer is not None and not self._damaged

    def _forked(self, wanted: Fetch) -> _ForkedError:
        """Note that what is here stays; return the error that says so. Raises StorageError."""
        self._store.mark_forked(self._state.digest)
        here = f"outer step {self._state.outer_step} of part {self._part}, {self._state.digest[:12]}"
        return _ForkedError(f"{here}, did not lead to outer step {wanted.outer_step}, {wanted.digest[:12]}: it is kept")

    def _replacing(self, wanted: Fetch) -> Generator[Wanted, Any, None]:
        """Take a snapshot, once others have confirmed it. It may be of a later outer step than the wanted one."""
        if self._is_whole and self._store.forked == self._state.digest:
            raise self._forked(wanted)
        snapshot: PartSnapshot = yield None
        outer_step, name = snapshot.metadata.get("outer_step"), snapshot.name
        if type(outer_step) is not int or outer_step < wanted.outer_step:
            raise GoneError(f"{wanted.source} is at outer step {outer_step} of part {self._part}, not at {wanted.outer_step}")
        if outer_step == wanted.outer_step and name != wanted.digest:
            raise GoneError(f"{wanted.source} has another outer step {outer_step} of part {self._part}")
        if not 0 <= snapshot.tokens <= MOST_COUNT:
            raise RemoteProtocolError(f"part {self._part}: {snapshot.tokens} tokens")
        try:
            peaks = peaks_from(snapshot.metadata.get("audit", ()))
        except (ValueError, TypeError) as error:
            raise RemoteProtocolError(f"part {self._part}: the head of an audit log cannot be read ({error})") from error
        yield Claimed(outer_step, name, snapshot.digest)
        outer = OuterState.restore(Schema.from_json(snapshot.schema), self._config, snapshot.tensors, snapshot.metadata)
        self._store.tokens, self._store.update_id = snapshot.tokens, name if outer_step else ""
        try:
            self._store.replace(outer, peaks)
        except (StorageError, RemoteProtocolError):
            self._recover()
            raise
        self._outer, self._held, self._damaged, self._claimed, self._staged = outer, None, False, _NOTHING, {}
        self._state = PartState(outer_step, name)

    # -- for others --------------------------------------------------------------------------------------------------------

    def kept(self, outer_step: int, update_id: str) -> Offer:
        """See `Source.kept`. It is read from the journal."""
        committed = self._store.committed(outer_step) if not self._damaged else None
        if committed is None or committed.update is None or committed.update["id"] != update_id:
            raise GoneError(f"the update to outer step {outer_step} of part {self._part} is not kept")
        offer = Offer.again(self._run_id, Update(**committed.update), committed)
        if offer.update.id != update_id:
            raise GoneError(f"the update to outer step {outer_step} of part {self._part} was named otherwise then")
        return offer

    def snapshot(self) -> PartSnapshot:
        """Return a copy of the state. Raises GoneError when there is none that is whole."""
        whole = self._whole()
        return replace(whole, tensors={name: each.clone() for name, each in whole.tensors.items()})

    def claimed(self) -> Claimed:
        """Return what the state comes to. Computed once of each. Raises as `snapshot`."""
        whole = self._whole()
        if (self._claimed.outer_step, self._claimed.name) != (self._state.outer_step, whole.name):
            self._claimed = Claimed(self._state.outer_step, whole.name, whole.digest)
        return self._claimed

    def _whole(self) -> PartSnapshot:
        """Return the state, whose tensors the next outer step writes into. What an owner's codec left out is not in it."""
        outer = self.outer
        if self._damaged:
            raise GoneError(f"part {self._part} is damaged")
        tensors = {name: each for name, each in outer.to_tensors().items() if not name.startswith("unrecorded.")}
        metadata = outer.metadata()
        if self._store.part_log is not None:
            try:
                metadata["audit"] = [each.hex() for each in self._store.part_log.tree.peaks]
            except StorageError as error:
                raise GoneError(f"part {self._part}: its audit log cannot be written ({error})") from error
        return PartSnapshot(self._state.digest, self._store.tokens, outer.schema.to_json(), tensors, metadata)


class Fetching:
    """A Fetch that is carried out: what its source is asked for, one thing after the other. Used by the replica's thread.

    `wanted`, while `answer` is None: (outer step, id) of an update; None, the snapshot; or what others are to confirm of it.
    """

    def __init__(self, replica: PartReplica, effect: Fetch) -> None:
        self.wanted: Wanted = None
        self.answer: Applied | Failed | None = None
        self._replica, self._effect, self._before = replica, effect, replica.state
        self._steps = replica.fetching(effect)
        self._go_on(lambda: next(self._steps))

    def give(self, found: Offer | PartSnapshot | EditError | None) -> None:
        """Take what the source answered, or why it did not; None: it is confirmed."""
        if isinstance(found, EditError):
            self._go_on(lambda: self._steps.throw(found))
        else:
            self._go_on(lambda: self._steps.send(found))

    def _go_on(self, step: Callable[[], Wanted]) -> None:
        try:
            self.wanted = step()
        except StopIteration:
            self.answer = _applied(self._effect.part, self._replica)
        except LocalProtocolError:
            raise
        except EditError as error:
            self.answer = _came_to_nothing(self._replica, self._effect, self._before, error)


def carry_out(
    replica: PartReplica,
    effect: Hold | Adopt | Fetch,
    *,
    offer: Offer | None = None,
    own: Sequence[MergeRecord] = (),
    source: Source | None = None,
) -> Held | Applied | Failed:
    """Carry out one effect of the council; return its answer. An answer to what it cannot do says why.

    Args:
        offer: of a Hold: its bytes, and the owner's own records. Of a Fetch: source, whom it names.
    """
    before = replica.state
    try:
        match effect:
            case Hold(update):
                if offer is None or offer.update != update:
                    raise LocalProtocolError("a Hold without the bytes of its update")
                replica.hold(offer, own)
                return Held(update)
            case Adopt():
                replica.adopt(effect.update)
                return _applied(effect.part, replica)
    except LocalProtocolError:
        raise
    except EditError as error:
        return _came_to_nothing(replica, effect, before, error)
    if source is None:
        raise LocalProtocolError("a Fetch without its source")
    fetching = Fetching(replica, effect)
    while fetching.answer is None:
        try:
            found = _answer(source, effect.part, fetching.wanted)
        except EditError as error:
            fetching.give(error)
        else:
            fetching.give(found)
    return fetching.answer


def _answer(source: Source, part: int, wanted: Wanted) -> Offer | PartSnapshot | None:
    """Return what is wanted; None: others have confirmed it. Raises EditError."""
    if wanted is None:
        return source.snapshot(part)
    if isinstance(wanted, Claimed):
        source.confirm(part, wanted)
        return None
    return source.kept(part, *wanted)


def _difference(again: Offer, offer: Offer) -> str:
    """Return in words how an owner's update differs from what it should be."""
    if again.update.tokens != offer.update.tokens:
        return f"{offer.update.tokens} tokens are said to be merged in all, not {again.update.tokens}"
    mine, theirs = (parse_json(each.manifest, finite=True) for each in (again, offer))
    if mine["theta"] != theirs["theta"]:
        return "it was merged for other parameters"
    for i, (ours, other) in enumerate(zip(mine["fragments"], theirs["fragments"], strict=True)):
        keys = [key for key in sorted({*ours, *other}) if ours.get(key) != other.get(key)]
        if keys or bytes(again.bodies[i]) != bytes(offer.bodies[i]):
            said = [f"{key} = {one_line(str(other.get(key)), 60)}, not {one_line(str(ours.get(key)), 60)}" for key in keys[:1]]
            return f"fragment {ours.get('fragment_id', i)}: {', '.join(said) or 'other bytes'}"
    return "it is described otherwise"


def _applied(part: int, replica: PartReplica) -> Applied:
    return Applied(part, replica.state.outer_step, replica.state.digest)


def _came_to_nothing(
    replica: PartReplica, effect: Hold | Adopt | Fetch, before: PartState, error: EditError
) -> Applied | Failed:
    """Return the answer to what raised."""
    if isinstance(effect, Hold):
        update = effect.update
        continues = (update.outer_step, update.base) == (before.outer_step + 1, before.digest)
        wrong = continues and isinstance(error, RemoteProtocolError) and not isinstance(error, _OthersError)
        late = update.outer_step <= before.outer_step
        return Failed(update.part, effect, str(error), wrong, isinstance(error, UnclearKeyError), is_late=late)
    if replica.state.outer_step == before.outer_step:
        return Failed(effect.part, effect, str(error), is_forked=isinstance(error, _ForkedError))
    _log.warning("part %d: %s", effect.part, error)  # some of the steps were taken
    return _applied(effect.part, replica)
