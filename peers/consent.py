"""`edit-peer consent`: show an operator the run's configuration, and keep the consent to it.

A member of a swarm has the configuration, which never changes, in its folder.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from edit.config.run import RunConfig
from edit.errors import ConfigError
from peers.carriers.hub.collective import ask_configuration
from peers.identity.peer_folder import Enrolment, PeerFolder
from peers.identity.policy import Consent, SitePolicy, changes, digest_of

__all__ = ["Terms", "ask_terms", "consent_to"]


@dataclass(frozen=True, slots=True)
class Terms:
    """What an operator consents to."""

    enrolled: Enrolment
    # The configuration, as the coordinator sent it; in a swarm, as the owners of parts send it.
    text: str
    policy: SitePolicy
    # Why policy.toml does not allow it; empty: it does, or there is none.
    refused: str

    @property
    def digest(self) -> str:
        return digest_of(self.text)

    @property
    def consented(self) -> bool:
        """Whether this is what was consented to before."""
        return self.policy.consent is not None and digest_of(self.policy.consent.config) == self.digest

    def lines(self) -> list[str]:
        """Return what is shown."""
        identity, before = self.enrolled.identity, self.policy.consent
        config = RunConfig.from_json(self.text)
        default = RunConfig.from_mapping({"swarm": {}} if config.swarm is not None else {})
        found = [
            f"run {identity.run_id}, in which this peer is {identity.peer_id}",
            f"coordinator {', '.join(self.enrolled.endpoints)}"
            if self.enrolled.endpoints
            else "a swarm, without a coordinator",
            f"configuration {self.digest}",
            "",
            "settings other than the defaults:",
            *([f"  {change}" for change in changes(_all(default), _all(config), "default")] or ["  none"]),
        ]
        if self.consented:
            found += ["", "this site has consented to it"]
        elif before is not None:
            found += ["", "since this site's consent:", *(f"  {change}" for change in changes(before.config, self.text))]
        if self.policy.digest:
            found += ["", self.refused or f"{self.policy.home / 'policy.toml'} allows it"]
        return found


def _all(config: RunConfig) -> str:
    """Return every setting as JSON; also the sections that the text leaves out where they are off."""
    return json.dumps(dataclasses.asdict(config), default=str)


def ask_terms(home: Path, now: float) -> Terms:
    """Ask the run's coordinator for the configuration. In a swarm, read it from the folder.

    now: unix seconds.

    Raises ConfigError, RefusedError, EvictedError, TransportError.
    """
    folder = PeerFolder(home)
    swarm = folder.of_swarm()
    enrolled = folder.load(now, swarm=swarm)
    if enrolled.identity.role != "peer":
        raise ConfigError(f"{home}: enrolled as {enrolled.identity.role}; only who trains consents")
    policy = SitePolicy.load(home, enrolled.identity, folder.key)
    if swarm:
        config = RunConfig.from_toml(folder.swarm_settings())
        return Terms(enrolled, config.to_json(), policy, next(policy.faults(config), ""))
    config, text = ask_configuration(enrolled.endpoints, enrolled.credentials, enrolled.identity)
    return Terms(enrolled, text, policy, next(policy.faults(config), ""))


def consent_to(terms: Terms) -> None:
    """Sign the terms, and write consent.json. Raises ConfigError where policy.toml does not allow them, StorageError."""
    home = terms.policy.home
    if terms.refused:
        raise ConfigError(f"{terms.refused}; change one of the two before you consent")
    Consent.give(terms.enrolled.identity, terms.text, terms.policy.digest, PeerFolder(home).key()).save(home)
