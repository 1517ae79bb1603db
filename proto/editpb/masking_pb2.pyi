from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MaskPlanRequest(_message.Message):
    __slots__ = ("run_id", "round_id", "fragment_id")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    round_id: int
    fragment_id: int
    def __init__(self, run_id: _Optional[str] = ..., round_id: _Optional[int] = ..., fragment_id: _Optional[int] = ...) -> None: ...

class MaskPlan(_message.Message):
    __slots__ = ("fragment_id", "bits", "limit", "exponents", "reference")
    FRAGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    BITS_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    EXPONENTS_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    fragment_id: int
    bits: int
    limit: int
    exponents: bytes
    reference: float
    def __init__(self, fragment_id: _Optional[int] = ..., bits: _Optional[int] = ..., limit: _Optional[int] = ..., exponents: _Optional[bytes] = ..., reference: _Optional[float] = ...) -> None: ...

class MaskAdvert(_message.Message):
    __slots__ = ("peer_id", "public_key", "mask_key", "signature")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    MASK_KEY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    public_key: bytes
    mask_key: bytes
    signature: bytes
    def __init__(self, peer_id: _Optional[str] = ..., public_key: _Optional[bytes] = ..., mask_key: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class MaskRoster(_message.Message):
    __slots__ = ("adverts",)
    ADVERTS_FIELD_NUMBER: _ClassVar[int]
    adverts: _containers.RepeatedCompositeFieldContainer[MaskAdvert]
    def __init__(self, adverts: _Optional[_Iterable[_Union[MaskAdvert, _Mapping]]] = ...) -> None: ...

class MaskShares(_message.Message):
    __slots__ = ("boxes", "self_digests", "recovery_digests", "pair_digests", "recovery", "self_hash", "recovery_hash", "signatures", "key_digests")
    BOXES_FIELD_NUMBER: _ClassVar[int]
    SELF_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    RECOVERY_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    PAIR_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    RECOVERY_FIELD_NUMBER: _ClassVar[int]
    SELF_HASH_FIELD_NUMBER: _ClassVar[int]
    RECOVERY_HASH_FIELD_NUMBER: _ClassVar[int]
    SIGNATURES_FIELD_NUMBER: _ClassVar[int]
    KEY_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    boxes: _containers.RepeatedScalarFieldContainer[bytes]
    self_digests: _containers.RepeatedScalarFieldContainer[bytes]
    recovery_digests: _containers.RepeatedScalarFieldContainer[bytes]
    pair_digests: _containers.RepeatedScalarFieldContainer[bytes]
    recovery: bytes
    self_hash: bytes
    recovery_hash: bytes
    signatures: _containers.RepeatedScalarFieldContainer[bytes]
    key_digests: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, boxes: _Optional[_Iterable[bytes]] = ..., self_digests: _Optional[_Iterable[bytes]] = ..., recovery_digests: _Optional[_Iterable[bytes]] = ..., pair_digests: _Optional[_Iterable[bytes]] = ..., recovery: _Optional[bytes] = ..., self_hash: _Optional[bytes] = ..., recovery_hash: _Optional[bytes] = ..., signatures: _Optional[_Iterable[bytes]] = ..., key_digests: _Optional[_Iterable[bytes]] = ...) -> None: ...

class MaskBox(_message.Message):
    __slots__ = ("dealer", "box", "self_digest", "recovery_digest", "signature")
    DEALER_FIELD_NUMBER: _ClassVar[int]
    BOX_FIELD_NUMBER: _ClassVar[int]
    SELF_DIGEST_FIELD_NUMBER: _ClassVar[int]
    RECOVERY_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    dealer: str
    box: bytes
    self_digest: bytes
    recovery_digest: bytes
    signature: bytes
    def __init__(self, dealer: _Optional[str] = ..., box: _Optional[bytes] = ..., self_digest: _Optional[bytes] = ..., recovery_digest: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class MaskComplaint(_message.Message):
    __slots__ = ("dealer", "key")
    DEALER_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    dealer: str
    key: bytes
    def __init__(self, dealer: _Optional[str] = ..., key: _Optional[bytes] = ...) -> None: ...

class MaskInbox(_message.Message):
    __slots__ = ("sharers", "boxes")
    SHARERS_FIELD_NUMBER: _ClassVar[int]
    BOXES_FIELD_NUMBER: _ClassVar[int]
    sharers: _containers.RepeatedScalarFieldContainer[str]
    boxes: _containers.RepeatedCompositeFieldContainer[MaskBox]
    def __init__(self, sharers: _Optional[_Iterable[str]] = ..., boxes: _Optional[_Iterable[_Union[MaskBox, _Mapping]]] = ...) -> None: ...

class MaskSurvivors(_message.Message):
    __slots__ = ("peers",)
    PEERS_FIELD_NUMBER: _ClassVar[int]
    peers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, peers: _Optional[_Iterable[str]] = ...) -> None: ...

class MaskSignature(_message.Message):
    __slots__ = ("peer_id", "signature")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    signature: bytes
    def __init__(self, peer_id: _Optional[str] = ..., signature: _Optional[bytes] = ...) -> None: ...

class MaskSignatures(_message.Message):
    __slots__ = ("survivors", "signatures")
    SURVIVORS_FIELD_NUMBER: _ClassVar[int]
    SIGNATURES_FIELD_NUMBER: _ClassVar[int]
    survivors: _containers.RepeatedScalarFieldContainer[str]
    signatures: _containers.RepeatedCompositeFieldContainer[MaskSignature]
    def __init__(self, survivors: _Optional[_Iterable[str]] = ..., signatures: _Optional[_Iterable[_Union[MaskSignature, _Mapping]]] = ...) -> None: ...

class MaskShare(_message.Message):
    __slots__ = ("dealer", "share")
    DEALER_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    dealer: str
    share: bytes
    def __init__(self, dealer: _Optional[str] = ..., share: _Optional[bytes] = ...) -> None: ...

class MaskReveal(_message.Message):
    __slots__ = ("self_shares", "recovery_shares")
    SELF_SHARES_FIELD_NUMBER: _ClassVar[int]
    RECOVERY_SHARES_FIELD_NUMBER: _ClassVar[int]
    self_shares: _containers.RepeatedCompositeFieldContainer[MaskShare]
    recovery_shares: _containers.RepeatedCompositeFieldContainer[MaskShare]
    def __init__(self, self_shares: _Optional[_Iterable[_Union[MaskShare, _Mapping]]] = ..., recovery_shares: _Optional[_Iterable[_Union[MaskShare, _Mapping]]] = ...) -> None: ...

class MaskNothing(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MaskRequest(_message.Message):
    __slots__ = ("run_id", "round_id", "advert", "shares", "closed", "confirm", "reveal", "complaint")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    ADVERT_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    CONFIRM_FIELD_NUMBER: _ClassVar[int]
    REVEAL_FIELD_NUMBER: _ClassVar[int]
    COMPLAINT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    round_id: int
    advert: MaskAdvert
    shares: MaskShares
    closed: MaskNothing
    confirm: bytes
    reveal: MaskReveal
    complaint: MaskComplaint
    def __init__(self, run_id: _Optional[str] = ..., round_id: _Optional[int] = ..., advert: _Optional[_Union[MaskAdvert, _Mapping]] = ..., shares: _Optional[_Union[MaskShares, _Mapping]] = ..., closed: _Optional[_Union[MaskNothing, _Mapping]] = ..., confirm: _Optional[bytes] = ..., reveal: _Optional[_Union[MaskReveal, _Mapping]] = ..., complaint: _Optional[_Union[MaskComplaint, _Mapping]] = ...) -> None: ...

class MaskReply(_message.Message):
    __slots__ = ("roster", "inbox", "survivors", "signatures", "done")
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    INBOX_FIELD_NUMBER: _ClassVar[int]
    SURVIVORS_FIELD_NUMBER: _ClassVar[int]
    SIGNATURES_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    roster: MaskRoster
    inbox: MaskInbox
    survivors: MaskSurvivors
    signatures: MaskSignatures
    done: MaskNothing
    def __init__(self, roster: _Optional[_Union[MaskRoster, _Mapping]] = ..., inbox: _Optional[_Union[MaskInbox, _Mapping]] = ..., survivors: _Optional[_Union[MaskSurvivors, _Mapping]] = ..., signatures: _Optional[_Union[MaskSignatures, _Mapping]] = ..., done: _Optional[_Union[MaskNothing, _Mapping]] = ...) -> None: ...
