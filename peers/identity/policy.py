"""What a site allows its peer: policy.toml in the peer's folder, and the consent to one configuration of a run.

The peer checks both whenever an aggregator tells it the run's configuration, before anything of its data has been sent, so no
run can switch them off. A site without policy.toml that has consented to nothing takes part in whatever it was invited to,
unless the run asks for its consent.

    [accept]    needs a consent: the run's digest is in `runs`, or the operator gave it (`edit-peer consent`); without this
                section it is needed where the run asks for it (`membership.consent`)
    [limits]    what the run may ask for
    [require]   what the run must have
    [protect]   what the peer does to all that it sends
    [data]      what is said of the data with a consent
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from edit.config.run import RunConfig
from edit.config.validation import build, require
from edit.durable_files import read_json, write_json
from edit.errors import ConfigError
from edit.plain_text import parse_toml, quoted
from edit.trust.signatures import Signer, is_signed
from editpb.consents import consent_statement, signed_consent
from editpb.identity import Identity
from editpb.limits import MAX_DATA_CHARS
from editpb.messages import Consent as SaidConsent
from editpb.messages import DataStatement
from peers.identity.known_members import read_members

__all__ = ["NO_POLICY", "Consent", "Protect", "Sections", "SitePolicy", "changes", "digest_of"]

_FORMAT = 1  # of consent.json
_DIGEST = "sha256:"
_NOTHING = DataStatement()
_MOST_SHOWN = 12  # changed settings in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class Accept:
    """The section [accept]. Where it stands, also empty, a run needs the operator's consent."""

    # Runs that are accepted without `edit-peer consent`, each `sha256:` and the digest of its configuration.
    runs: tuple[str, ...] = ()
    # Settings that may change unasked after a consent, as `rounds.grace_s` or `membership.*`.
    auto: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for run in self.runs:
            rule = "must be sha256: and 64 hexadecimal digits, as edit-peer consent prints it"
            require(_is_digest(run), "accept.runs", run, rule)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The section [limits]."""

    # The largest model, in parameters; 0: any.
    max_parameters: int = 0
    # Names of models that may be trained, as `builtin:gpt`, `hf:llama` or `hf:*`; empty: any.
    models: tuple[str, ...] = ()
    # The last day, in UTC, on which the peer begins to train or connects again; absent: no end.
    until: datetime.date | None = None
    # The most that the peer sends on a day of UTC, in 10^9 bytes, as `--max-mbit` counts them; 0: any.
    max_gb_per_day: float = 0.0

    def __post_init__(self) -> None:
        require(
            0 <= self.max_gb_per_day < math.inf,
            "limits.max_gb_per_day",
            self.max_gb_per_day,
            "must be a number, and not negative",
        )
        require(self.max_parameters >= 0, "limits.max_parameters", self.max_parameters, "must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class Require:
    """The section [require]."""

    # Whether contributions must be masked (`secagg.enabled`).
    secagg: bool = False
    # The least number of peers behind a commit (`rounds.quorum`); 0: any.
    min_peers: int = 0
    # A file of the members with whom keys are shared, beside policy.toml, as that of `edit-peer run --members`; needs secagg.
    members: str = ""
    # Whether the run must keep an audit log (`audit.enabled`).
    audit: bool = False
    # Whether changes of the run's configuration must need approvals (`governance.approvers`).
    governance: bool = False
    # `example` or `organisation`: the run must have that level of differential privacy; empty: it need not.
    privacy: str = ""
    # The largest epsilon (`privacy.epsilon_max`) that the run may have; 0: any. Needs privacy.
    epsilon_max: float = 0.0

    def __post_init__(self) -> None:
        require(self.min_peers >= 0, "require.min_peers", self.min_peers, "must not be negative")
        rule = 'must be "example" or "organisation", or absent'
        require(self.privacy in ("", "example", "organisation"), "require.privacy", self.privacy, rule)
        require(self.epsilon_max >= 0, "require.epsilon_max", self.epsilon_max, "must not be negative")
        rule = "has no effect without require.privacy; set that, too"
        require(not self.epsilon_max or bool(self.privacy), "require.epsilon_max", self.epsilon_max, rule)
        rule = "has no effect without require.secagg = true; set that, too"
        require(not self.members or self.secagg, "require.members", self.members, rule)


HIDEABLE = ("loss", "tokens_per_s", "step_s", "device", "metrics")


@dataclass(frozen=True, slots=True, kw_only=True)
class Protect:
    """The section [protect]."""

    # The largest norm of a contribution, over all fragments and ranks: a longer one is made as short before it is encoded, and
    # what is cut off is not sent later; 0: any.
    clip: float = 0.0
    # What the peer's reports leave out: `loss`, `tokens_per_s`, `step_s`, `device`, `metrics`.
    hide: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(0 <= self.clip < math.inf, "protect.clip", self.clip, "must be a number, and not negative")
        for each in self.hide:
            require(each in HIDEABLE, "protect.hide", each, f"must be of {', '.join(HIDEABLE)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The section [data]: what the site says of its data with its consent, for the run's audit log."""

    # In words.
    statement: str = ""
    # `sha256:` and the digest of a list of the files, which the site keeps.
    manifest: str = ""
    # The licence, or the agreement under which it is used.
    licence: str = ""

    def __post_init__(self) -> None:
        for name, text in (("statement", self.statement), ("licence", self.licence)):
            ok = text.isprintable() and len(text) <= MAX_DATA_CHARS
            require(ok, f"data.{name}", text[:80], f"must be one printable line of at most {MAX_DATA_CHARS} characters")
        rule = "must be sha256: and 64 hexadecimal digits"
        require(not self.manifest or _is_digest(self.manifest), "data.manifest", self.manifest, rule)

    @property
    def said(self) -> DataStatement:
        """As it is said with a consent."""
        return DataStatement(self.statement, _hex(self.manifest), self.licence)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sections:
    """policy.toml."""

    accept: Accept | None = None
    limits: Limits = field(default_factory=Limits)
    require: Require = field(default_factory=Require)
    protect: Protect = field(default_factory=Protect)
    data: Data = field(default_factory=Data)


@dataclass(frozen=True, slots=True)
class Consent:
    """The operator's consent to one configuration of a run, signed with the peer's key."""

    run_id: str
    peer_id: str
    # The configuration: the JSON text that the aggregators send.
    config: str
    # `digest_of` the policy.toml of that moment; empty: there was none.
    policy: str
    signature: bytes

    @classmethod
    def give(cls, identity: Identity, config: str, policy: str, key: bytes) -> Consent:
        """Return the consent, signed. key: the peer's, in PEM. Raises ConfigError for another kind of key."""
        signed = signed_consent(identity.run_id, identity.peer_id, _hex(digest_of(config)), _hex(policy), Signer(key))
        return cls(identity.run_id, identity.peer_id, config, policy, signed.signature)

    def save(self, home: Path) -> None:
        """Write consent.json. Raises StorageError."""
        values = {
            "run_id": self.run_id,
            "peer_id": self.peer_id,
            "config": self.config,
            "policy": self.policy,
            "signature": base64.b64encode(self.signature).decode(),
        }
        write_json(home / "consent.json", values, version=_FORMAT)

    @classmethod
    def load(cls, home: Path, public_key: Callable[[], bytes]) -> Consent | None:
        """Return the consent that was given; None: none was. public_key: the peer's (DER).

        Raises ConfigError where the file is damaged, or is not signed with this key.
        """
        path = home / "consent.json"
        if not path.exists():
            return None
        try:
            values: Any = read_json(path, version=_FORMAT)
            run_id, peer_id, config, policy = (str(values[key]) for key in ("run_id", "peer_id", "config", "policy"))
            found = cls(run_id, peer_id, config, policy, base64.b64decode(str(values["signature"]), validate=True))
        except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
            raise ConfigError(
                f"{path}: is damaged ({error}); consent again: edit-peer consent --home {quoted(home)}"
            ) from error
        signed = consent_statement(run_id, peer_id, _hex(digest_of(config)), _hex(policy))
        if not is_signed(public_key(), found.signature, signed):
            raise ConfigError(
                f"{path}: is not signed with this peer's key; consent again: edit-peer consent --home {quoted(home)}"
            )
        return found


@dataclass(frozen=True, slots=True)
class SitePolicy:
    """What the site of one peer allows."""

    # The peer's folder.
    home: Path = Path()
    accept: Accept | None = None
    limits: Limits = Limits()
    require: Require = Require()
    protect: Protect = Protect()
    data: Data = Data()
    consent: Consent | None = None
    # `digest_of` policy.toml; empty: there is none.
    digest: str = ""
    # Signs a consent to a configuration, given its text; None: nothing is said to anybody.
    sign: Callable[[str], SaidConsent] | None = None
    # Unix seconds.
    now: Callable[[], float] = time.time

    @classmethod
    def load(cls, home: Path, identity: Identity, key: Callable[[], bytes], now: Callable[[], float] = time.time) -> SitePolicy:
        """Read policy.toml and consent.json, as far as they are there. identity, key: the peer's; the key in PEM.

        Raises ConfigError that names the file and the key.
        """
        consent = Consent.load(home, lambda: Signer(key()).public_key)
        if consent is not None and consent.run_id != identity.run_id:
            consent = None  # to the run that this folder was enrolled in before
        path = home / "policy.toml"

        def sign(text: str, policy: str = "", data: DataStatement = _NOTHING) -> SaidConsent:
            config = _hex(digest_of(text))
            return signed_consent(identity.run_id, identity.peer_id, config, _hex(policy), Signer(key()), data)

        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return cls(home=home, consent=consent, sign=sign, now=now)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
        try:
            sections = build(Sections, parse_toml(data.decode()), "")
        except ValueError as error:
            raise ConfigError(f"{path}: is not TOML: {error}") from error
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        digest = digest_of(data)
        signing = partial(sign, policy=digest, data=sections.data.said)
        return cls(
            home=home,
            accept=sections.accept,
            limits=sections.limits,
            require=sections.require,
            protect=sections.protect,
            data=sections.data,
            consent=consent,
            digest=digest,
            sign=signing,
            now=now,
        )

    def members(self, given: Mapping[str, tuple[str, ...]] | None, option: str) -> Mapping[str, tuple[str, ...]] | None:
        """Return the key hashes of the members with whom keys are shared, as `read_members`; None: all.

        given: what the `option` said. Raises ConfigError where the policy names a file, and there is the option, too.
        """
        if not self.require.members:
            return given
        if given is not None:
            raise ConfigError(f"{option}: {self.home / 'policy.toml'} names the members (require.members); leave it out")
        return read_members(self.home / self.require.members)

    def check(self, text: str, config: RunConfig) -> SaidConsent | None:
        """Raise ConfigError in one line unless the site allows this configuration. text: as the aggregators sent it.

        Returns the consent that is said to them; None: the site asks for none, and has given none.
        """
        for fault in self.faults(config):
            raise ConfigError(f"{fault}; this peer does not take part")
        asked = self.accept is not None or self.consent is not None or config.membership.consent
        if asked:
            self._check_consent(text)
        return self.sign(text) if asked and self.sign is not None else None

    @property
    def has_say(self) -> bool:
        """Whether there is a policy.toml, or a consent."""
        return bool(self.digest) or self.consent is not None

    def check_host(self, text: str, config: RunConfig) -> None:
        """Raise ConfigError in one line unless the site allows a host that does not train under this configuration.

        It contributes nothing, so [protect] and [data] have no effect, and a run that asks for consents asks none of it.
        """
        for fault in self._run_faults(config):
            raise ConfigError(f"{self.home / 'policy.toml'}: {fault}; this host does not start")
        if self.accept is not None or self.consent is not None:
            self._check_consent(text)

    def check_parameters(self, count: int) -> None:
        """Raise ConfigError for a model of more parameters than the site allows."""
        most = self.limits.max_parameters
        if most and count > most:
            raise ConfigError(
                f"{self.home / 'policy.toml'}: limits.max_parameters = {most}: the run's model has {count}; "
                "this peer does not take part"
            )

    def faults(self, config: RunConfig) -> Iterator[str]:
        """Yield what [limits] and [require] have against a configuration, each in one line that names the file."""
        found = (*self._run_faults(config), *self._clip_faults(config))
        return (f"{self.home / 'policy.toml'}: {fault}" for fault in found)

    def _run_faults(self, config: RunConfig) -> Iterator[str]:
        limits, wanted, privacy = self.limits, self.require, config.privacy
        if limits.models and not any(fnmatchcase(config.model.name, pattern) for pattern in limits.models):
            yield f"limits.models = {list(limits.models)}: the run trains {config.model.name}"
        if limits.until is not None:
            today = datetime.datetime.fromtimestamp(self.now(), datetime.UTC).date()
            if today > limits.until:
                yield f"limits.until = {limits.until}: that is over"
        if limits.max_gb_per_day and config.swarm is not None:
            yield f"limits.max_gb_per_day = {limits.max_gb_per_day:g}: a member of a swarm serves its parts to others, too"
        if wanted.secagg and not config.secagg.enabled:
            yield "require.secagg = true: the run has secagg.enabled = false"
        if config.rounds.quorum < wanted.min_peers:
            yield f"require.min_peers = {wanted.min_peers}: the run has rounds.quorum = {config.rounds.quorum}"
        if wanted.audit and not config.audit.enabled:
            yield "require.audit = true: the run has audit.enabled = false"
        if wanted.governance and not config.governance.enabled:
            yield "require.governance = true: the run has no governance.approvers"
        if wanted.privacy and privacy.level != wanted.privacy:
            yield f'require.privacy = "{wanted.privacy}": the run has privacy.level = "{privacy.level}"'
        if wanted.epsilon_max and privacy.epsilon_max > wanted.epsilon_max:
            yield f"require.epsilon_max = {wanted.epsilon_max:g}: the run has privacy.epsilon_max = {privacy.epsilon_max:g}"

    def _clip_faults(self, config: RunConfig) -> Iterator[str]:
        clip = f"protect.clip = {self.protect.clip:g}"
        parts = config.aggregators.count if config.swarm is None else config.swarm.parts
        if self.protect.clip and parts > 1:
            yield f"{clip}: the run's model is in {parts} parts, with a contribution to each"
        if self.protect.clip and config.outer.algorithm == "gossip":
            yield f'{clip}: with outer.algorithm = "gossip" partners swap parameters, which are not shortened'

    def _check_consent(self, text: str) -> None:
        digest, accept = digest_of(text), self.accept or Accept()
        if digest in accept.runs:
            return
        look = f"look at it with: edit-peer consent --home {quoted(self.home)}"
        if self.consent is None:
            raise ConfigError(f"nobody at this site has consented to the run's configuration {digest}; {look}")
        changed = [
            change
            for change in changes(self.consent.config, text)
            if not any(fnmatchcase(change.partition(" ")[0], pattern) for pattern in accept.auto)
        ]
        if changed:
            more = f", and {len(changed) - _MOST_SHOWN} more" if len(changed) > _MOST_SHOWN else ""
            listed = ", ".join(changed[:_MOST_SHOWN]) + more
            raise ConfigError(f"the run's configuration is not the one that this site consented to: {listed}; {look}")


NO_POLICY = SitePolicy()


def _is_digest(text: str) -> bool:
    rest = text.removeprefix(_DIGEST)
    return text.startswith(_DIGEST) and len(rest) == 64 and set(rest) <= set("0123456789abcdef")


def _hex(digest: str) -> str:
    return digest.removeprefix(_DIGEST)


def digest_of(text: str | bytes) -> str:
    """Return `sha256:` and the digest of a text, in hexadecimal digits."""
    return _DIGEST + hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()


def changes(before: str, after: str, was: str = "was") -> list[str]:
    """Return what differs between two configurations (JSON), each as `sync.every = 100 (was 30)`, in the order of names.

    `outer.chosen` only says in words why `outer.lr` and the like are what they are.
    """
    old, new = (dict(_flat(json.loads(text))) for text in (before, after))
    return [
        f"{name} = {json.dumps(new.get(name))} ({was} {json.dumps(old.get(name))})"
        for name in sorted((old.keys() | new.keys()) - {"outer.chosen"})
        if old.get(name) != new.get(name)
    ]


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{before}{key}.")
        else:
            yield before + key, value
