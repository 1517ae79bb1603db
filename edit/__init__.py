"""EDiT: local SGD with layer-wise exchange and a pseudo-gradient penalty.

The names exported here are the public API: what a user's own loop needs (`EditWorker`, a `Collective`), a run's configuration,
and the values and errors that cross the seams. Importing it starts nothing and reads no file; each name is imported when it is
asked for: a command which only asks a question answers at once, without torch, and `edit.interrupts` comes before all else.

Owns: the algorithm. Must not know: sockets, threads, clocks, the environment (edit.lab, telemetry, trackers and web aside). In
reading order:

reference      every rule of the algorithm, naively, on one page
config/        the settings and their checks
records        the values that cross a seam
collective     the seam between the algorithm and a carrier
fragments/     what is exchanged
codecs/        flat fp32 vectors to bytes and back
merging/       contributions to one outer step
local          a whole run in one process
replica/       a model's two sets of parameters: outer and local
worker/        one peer's exchange
rounds/        when a round opens, closes and commits
integrations/  callbacks for training frameworks
web/           the page of a run
lab/           edit-lab
"""

import importlib
import sys
import typing

if typing.TYPE_CHECKING:
    from edit.codecs import codec, codec_names, decode
    from edit.codecs.error_feedback import ErrorFeedback
    from edit.collective import Collective, CompositeCollective
    from edit.config.run import (
        AggregatorsConfig,
        CodecConfig,
        CodecSpec,
        FragmentCodec,
        GossipConfig,
        InnerConfig,
        MembershipConfig,
        ModelConfig,
        OuterConfig,
        PenaltyConfig,
        RoundsConfig,
        RunConfig,
        ServerConfig,
        StorageConfig,
        SyncConfig,
    )
    from edit.errors import (
        ConfigError,
        EditError,
        EvictedError,
        LocalProtocolError,
        RefusedError,
        RemoteProtocolError,
        StorageError,
        TransportError,
    )
    from edit.fragments.digest import digest
    from edit.fragments.schema import FragmentSpec, Schema, TensorSpec, plan_fragments
    from edit.local import LocalCollective, LocalGossip, LocalRun
    from edit.merging.outer_state import OuterState
    from edit.records import (
        Aborted,
        Commit,
        Committed,
        Contribution,
        EncodedTensor,
        Evicted,
        Finished,
        FragmentCommit,
        NeedsSnapshot,
        Outcome,
        PeerVerdict,
        Snapshot,
        Verdict,
    )
    from edit.worker.worker import EditWorker, WorkerConfig

__version__ = "0.1.0"

__all__ = [
    "Aborted",
    "AggregatorsConfig",
    "CodecConfig",
    "CodecSpec",
    "Collective",
    "Commit",
    "Committed",
    "CompositeCollective",
    "ConfigError",
    "Contribution",
    "EditError",
    "EditWorker",
    "EncodedTensor",
    "ErrorFeedback",
    "Evicted",
    "EvictedError",
    "Finished",
    "FragmentCodec",
    "FragmentCommit",
    "FragmentSpec",
    "GossipConfig",
    "InnerConfig",
    "LocalCollective",
    "LocalGossip",
    "LocalProtocolError",
    "LocalRun",
    "MembershipConfig",
    "ModelConfig",
    "NeedsSnapshot",
    "Outcome",
    "OuterConfig",
    "OuterState",
    "PeerVerdict",
    "PenaltyConfig",
    "RefusedError",
    "RemoteProtocolError",
    "RoundsConfig",
    "RunConfig",
    "Schema",
    "ServerConfig",
    "Snapshot",
    "StorageConfig",
    "StorageError",
    "SyncConfig",
    "TensorSpec",
    "TransportError",
    "Verdict",
    "WorkerConfig",
    "codec",
    "codec_names",
    "decode",
    "digest",
    "plan_fragments",
]

_MODULES = {
    "codec": "edit.codecs",
    "codec_names": "edit.codecs",
    "decode": "edit.codecs",
    "ErrorFeedback": "edit.codecs.error_feedback",
    "Collective": "edit.collective",
    "CompositeCollective": "edit.collective",
    "AggregatorsConfig": "edit.config.run",
    "CodecConfig": "edit.config.run",
    "CodecSpec": "edit.config.run",
    "FragmentCodec": "edit.config.run",
    "GossipConfig": "edit.config.run",
    "InnerConfig": "edit.config.run",
    "MembershipConfig": "edit.config.run",
    "ModelConfig": "edit.config.run",
    "OuterConfig": "edit.config.run",
    "PenaltyConfig": "edit.config.run",
    "RoundsConfig": "edit.config.run",
    "RunConfig": "edit.config.run",
    "ServerConfig": "edit.config.run",
    "StorageConfig": "edit.config.run",
    "SyncConfig": "edit.config.run",
    "ConfigError": "edit.errors",
    "EditError": "edit.errors",
    "EvictedError": "edit.errors",
    "LocalProtocolError": "edit.errors",
    "RefusedError": "edit.errors",
    "RemoteProtocolError": "edit.errors",
    "StorageError": "edit.errors",
    "TransportError": "edit.errors",
    "digest": "edit.fragments.digest",
    "FragmentSpec": "edit.fragments.schema",
    "Schema": "edit.fragments.schema",
    "TensorSpec": "edit.fragments.schema",
    "plan_fragments": "edit.fragments.schema",
    "LocalCollective": "edit.local",
    "LocalGossip": "edit.local",
    "LocalRun": "edit.local",
    "OuterState": "edit.merging.outer_state",
    "Aborted": "edit.records",
    "Commit": "edit.records",
    "Committed": "edit.records",
    "Contribution": "edit.records",
    "EncodedTensor": "edit.records",
    "Evicted": "edit.records",
    "Finished": "edit.records",
    "FragmentCommit": "edit.records",
    "NeedsSnapshot": "edit.records",
    "Outcome": "edit.records",
    "PeerVerdict": "edit.records",
    "Snapshot": "edit.records",
    "Verdict": "edit.records",
    "EditWorker": "edit.worker.worker",
    "WorkerConfig": "edit.worker.worker",
}


def __getattr__(name: str) -> object:
    """A public name, from its module (PEP 562); or a module that has some, as `edit.errors`."""
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    if within := [module for module in _MODULES.values() if f"{module}.".startswith(f"edit.{name}.")]:
        for module in within:
            importlib.import_module(module)
        return sys.modules[f"edit.{name}"]
    raise AttributeError(f"module 'edit' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Also the names that were not asked for yet: for `help(edit)`, and what completes names."""
    return sorted({*globals(), *__all__})
