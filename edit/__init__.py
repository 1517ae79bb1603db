"""EDiT: local SGD with layer-wise exchange and a pseudo-gradient penalty.

The names exported here are the public API: what a user's own loop needs (`EditWorker`, a `Collective`), a run's configuration,
and the values and errors that cross the seams. Importing it starts nothing and reads no file; torch is imported with the first
name that needs it, so that a command which only asks a question answers at once.

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
import typing

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
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec, plan_fragments
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

if typing.TYPE_CHECKING:
    from edit.codecs import codec, codec_names, decode
    from edit.codecs.error_feedback import ErrorFeedback
    from edit.fragments.digest import digest
    from edit.local import LocalCollective, LocalGossip, LocalRun
    from edit.merging.outer_state import OuterState
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

_LAZY = {
    "codec": "edit.codecs",
    "codec_names": "edit.codecs",
    "decode": "edit.codecs",
    "ErrorFeedback": "edit.codecs.error_feedback",
    "LocalCollective": "edit.local",
    "LocalGossip": "edit.local",
    "LocalRun": "edit.local",
    "digest": "edit.fragments.digest",
    "OuterState": "edit.merging.outer_state",
    "EditWorker": "edit.worker.worker",
    "WorkerConfig": "edit.worker.worker",
}


def __getattr__(name: str) -> object:
    """A public name whose module needs torch (PEP 562)."""
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'edit' has no attribute {name!r}")
