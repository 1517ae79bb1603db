"""The configuration under which a peer takes part, kept in its folder, where changes of it need approvals.

configuration.json    the configuration, and its number. A coordinator that tells another one must show that it was approved as
                      this one asks for (`editpb.approvals`)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cryptography import x509

from edit.durable_files import read_json, write_json
from edit.errors import ConfigError, RefusedError
from editpb.approvals import ApprovalRules, check_changes, governance_of, same_settings
from editpb.messages import ConfigChange, Configuration

__all__ = ["KeptConfiguration"]

_FORMAT = 1  # of configuration.json
_FILE = "configuration.json"


class KeptConfiguration:
    """What a peer holds a changed configuration to. Make it with `open`. Used on the loop's thread.

    Args:
        path: configuration.json.
        rules: which approvals count.
        known: the configuration under which this peer took part last; None: none whose changes need approvals.
    """

    def __init__(self, path: Path, rules: ApprovalRules, known: Configuration | None) -> None:
        self._path, self._rules, self._known = path, rules, known
        self._followed: Configuration | None = None  # the last one that was shown to follow from it

    @classmethod
    def open(
        cls, home: Path, run_id: str, authorities: bytes, members: Mapping[str, tuple[str, ...]] | None = None
    ) -> KeptConfiguration:
        """Read what is kept in a peer's folder.

        Args:
            authorities: of the run, PEM.
            members: hashes of the keys of the members that this peer knows, by name, earlier ones, too; None: of none.

        Raises ConfigError where the file is damaged.
        """
        path = home / _FILE
        rules = ApprovalRules(run_id, x509.load_pem_x509_certificates(authorities), members)
        if not path.exists():
            return cls(path, rules, None)
        try:
            values: Any = read_json(path, version=_FORMAT)
            known = Configuration(int(values["number"]), str(values["config"]))
            if str(values["run_id"]) != run_id:
                return cls(path, rules, None)  # of the run that this folder was enrolled in before
            governance_of(known.text)
        except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
            raise ConfigError(f"{path}: is damaged ({error}); restore it from a copy") from error
        return cls(path, rules, known)

    @property
    def number(self) -> int:
        """The number of the configuration that is known; 0: none is."""
        return self._known.number if self._known is not None else 0

    def check(self, told: Configuration, changes: Sequence[ConfigChange]) -> tuple[str, ...]:
        """Return who approved the last change to what a coordinator tells; () where that needs nobody.

        A later number of the same settings needs no changes to be shown; where they are not, it is only said.

        Raises RefusedError where what is known asks for approvals that are missing, ConfigError for what is no configuration.
        """
        if (known := self._known) is None:
            return ()
        try:
            names = check_changes(self._rules, known, told, changes)
        except (RefusedError, ConfigError):
            if not same_settings(known.text, told.text):
                raise
            return ()
        self._followed = told
        return names

    def keep(self, told: Configuration) -> None:
        """Note that this peer takes part under a configuration that `check` has taken. Raises StorageError.

        One with the settings of the known one is noted only if it was shown to follow from it: else its number is only said.
        """
        known = self._known
        if known is None:
            if not governance_of(told.text).enabled:
                return
        elif same_settings(known.text, told.text) and (told.number <= known.number or told != self._followed):
            return
        values = {"run_id": self._rules.run_id, "number": told.number, "config": told.text}
        write_json(self._path, values, version=_FORMAT)
        self._known = told
