"""Which configuration a run is served under: that of run.toml, or the one in force while a changed one lacks approvals.

In force is the last configuration that the audit log has. Where it has governance.approvers, a changed run.toml counts only
with their approvals, which are entries of the log: so a restart, also after a kill, finds them again.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509

from aggregator.storage.state_folder import AUDIT_LOG, AUTHORITY, StateFolder
from edit.config.run import RunConfig
from edit.errors import ConfigError, RefusedError, RemoteProtocolError, StaleError, StorageError
from edit.trust.canonical import parse_canonical
from editpb.approvals import ApprovalRules, governance_of, still_needed
from editpb.audit_log import DAMAGE, approval_in
from editpb.limits import MAX_APPROVALS, MAX_CHANGES
from editpb.messages import Approval, ConfigChange, Configuration, Proposal

__all__ = ["Configurations", "authorities_of", "configurations_of"]

_KINDS = (b'"kind":"genesis"', b'"kind":"config"', b'"kind":"approval"')
_MOST_BYTES = 4 << 20  # of the changes that are sent at a time


@dataclass(slots=True)
class Configurations:
    """The configurations of a run, and the one that waits for approvals. Make it with `configurations_of`.

    Used on the event loop once the run is served.
    """

    # Under which the run is served, with run.toml's own section [server].
    config: RunConfig
    rules: ApprovalRules
    # The one that `config` is, as peers are told.
    in_force: Configuration
    # All changes that led to it, in order.
    changes: list[ConfigChange] = field(default_factory=list)
    # The one of run.toml, where it lacks approvals; None: run.toml is served.
    proposed: Configuration | None = None
    # Those of the proposed one that count, by approver.
    approvals: dict[str, Approval] = field(default_factory=dict)

    @property
    def missing(self) -> int:
        """How many more approvals the proposed configuration needs; 0 where none waits."""
        return still_needed(self.in_force, self.proposed.text, self.approvals) if self.proposed is not None else 0

    def text(self, evicted: Callable[[str], bool]) -> str:
        """Say what is waited for; '': nothing. evicted: whether a member was, and can approve nothing more."""
        if (proposed := self.proposed) is None:
            return ""
        if not (missing := self.missing):
            return f"configuration sha256:{proposed.digest} has its approvals, of {_names(self.approvals)}"
        others = [name for name in governance_of(self.in_force.text).names if name not in self.approvals]
        able, gone = [name for name in others if not evicted(name)], [name for name in others if evicted(name)]
        more = f"waiting for {missing} more approval{'s' * (missing > 1)} of configuration sha256:{proposed.digest}"
        given = f"; {_names(self.approvals)} approved it" if self.approvals else ""
        few = f" (too few are left: {', '.join(gone)} evicted)" if len(able) < missing else ""
        return f"{more}: approvers {', '.join(able) or 'none'}{few}{given}"

    def since(self, number: int) -> tuple[ConfigChange, ...]:
        """Return the changes since a configuration that a peer knows, the last ones where they are too many.

        number: of that configuration; 0: it knows none, and is told of none.
        """
        if number == 0:
            return ()
        found: list[ConfigChange] = []
        room = _MOST_BYTES
        for change in reversed(self.changes[-MAX_CHANGES:]):
            room -= len(change.to.text.encode()) + sum(len(each.certificate) + 512 for each in change.approvals)
            if change.to.number <= number or room < 0:
                break
            found.append(change)
        return tuple(reversed(found))

    def proposal(self, known: int) -> Proposal:
        """Return what waits for approvals. known: the number of the configuration that the asker knows; 0: none."""
        text = self.proposed.text if self.proposed is not None else ""
        return Proposal(self.in_force, self.since(known), text, tuple(self.approvals.values()))

    def check(self, approval: Approval) -> str:
        """Return the name of the approver. Raises RemoteProtocolError; StaleError where another one waits, or none."""
        if (proposed := self.proposed) is None:
            raise StaleError(f"no configuration waits for approvals; configuration {self.in_force.number} is in force")
        if approval.config_digest != proposed.digest:
            raise StaleError(f"the configuration that waits for approvals is sha256:{proposed.digest}")
        return self.rules.check(approval, self.in_force, proposed.digest)


def configurations_of(folder: StateFolder) -> Configurations:
    """Return the configurations of a run's folder.

    Raises ConfigError (also for a run.toml that would end the log, in which approvals stand), StorageError (a damaged log).
    """
    written = folder.config()
    rules = ApprovalRules(folder.run_id, authorities_of(folder.path))
    logged, approvals = _logged(folder.path / AUDIT_LOG) if not folder.aggregator else ([], [])
    if not logged:
        return Configurations(written, rules, Configuration(1, written.to_json()))
    try:
        return _standing(folder, written, rules, logged, approvals)
    except ConfigError as error:
        raise ConfigError(f"{folder.run_toml}: {error}") from error


def _standing(
    folder: StateFolder,
    written: RunConfig,
    rules: ApprovalRules,
    logged: Sequence[Configuration],
    approvals: Sequence[Approval],
) -> Configurations:
    changes = [ConfigChange(after, _given(rules, before, after, approvals)) for before, after in itertools.pairwise(logged)]
    in_force, text = logged[-1], written.to_json()
    if text == in_force.text:
        return Configurations(written, rules, in_force, changes)
    governed, after = governance_of(in_force.text).enabled, Configuration(in_force.number + 1, text)
    if governed and not written.audit.enabled:
        raise ConfigError(
            "audit.enabled = False: the configuration in force has governance.approvers, whose approvals are entries of the "
            "audit log; first remove governance.approvers, with their approvals"
        )
    given = _given(rules, in_force, after, approvals)
    change = ConfigChange(after, given)
    try:
        rules.check_change(in_force, change)
    except RefusedError:
        served = dataclasses.replace(RunConfig.from_json(in_force.text), server=written.server)
        if served.to_json() != in_force.text:
            raise ConfigError(
                f"configuration {in_force.number} of the audit log, which is in force, is written otherwise by this version of "
                f"the software; have the change to sha256:{after.digest} approved under the version before"
            ) from None
        by_name = {rules.check(each, in_force, after.digest): each for each in given}
        return Configurations(served, rules, in_force, changes, after, by_name)
    return Configurations(written, rules, after, [*changes, change])


def _given(
    rules: ApprovalRules, before: Configuration, after: Configuration, approvals: Sequence[Approval]
) -> tuple[Approval, ...]:
    """Return the approvals of a change that count, one of each approver."""
    found: dict[str, Approval] = {}
    if not governance_of(before.text).enabled:
        return ()
    for approval in approvals:
        try:
            found.setdefault(rules.check(approval, before, after.digest), approval)
        except RemoteProtocolError:
            continue  # of another change: it stays in the log, and is verified there
    return tuple(found.values())[:MAX_APPROVALS]


def _logged(path: Path) -> tuple[list[Configuration], list[Approval]]:
    """Return the configurations of an audit log, and all approvals. `AuditLog` verifies the log itself.

    Raises StorageError.
    """
    configurations: list[Configuration] = []
    approvals: list[Approval] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file):
                if not any(kind in line for kind in _KINDS) or not line.endswith(b"\n"):
                    continue
                try:
                    entry = parse_canonical(line[:-1])
                    if entry["kind"] == "approval":
                        approvals.append(approval_in(entry))
                    elif entry["kind"] in ("genesis", "config"):
                        configurations.append(Configuration(len(configurations) + 1, str(entry["config"])))
                except DAMAGE as error:
                    raise StorageError(f"{path}: entry {number} is damaged ({error}); restore it from a copy") from error
    except FileNotFoundError:
        return [], []
    except OSError as error:
        raise StorageError(f"{path}: cannot be read ({error.strerror})") from error
    return configurations, approvals


def authorities_of(folder: Path) -> list[x509.Certificate]:
    """Return the run's authority by the folder of a run, or of an export; none where its certificate is not there.

    Raises StorageError when it is damaged, or cannot be read: without it, approvals would count whoever signed them.
    """
    path = folder / AUTHORITY
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise StorageError(f"{path}: is damaged ({error}); restore it from a copy") from error


def _names(approvals: dict[str, Approval]) -> str:
    return ", ".join(sorted(approvals))
