from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Approval(_message.Message):
    __slots__ = ("config_digest", "before_digest", "number", "certificate", "signature")
    CONFIG_DIGEST_FIELD_NUMBER: _ClassVar[int]
    BEFORE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    config_digest: str
    before_digest: str
    number: int
    certificate: bytes
    signature: bytes
    def __init__(self, config_digest: _Optional[str] = ..., before_digest: _Optional[str] = ..., number: _Optional[int] = ..., certificate: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class ConfigChange(_message.Message):
    __slots__ = ("number", "config_json", "approvals")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    APPROVALS_FIELD_NUMBER: _ClassVar[int]
    number: int
    config_json: str
    approvals: _containers.RepeatedCompositeFieldContainer[Approval]
    def __init__(self, number: _Optional[int] = ..., config_json: _Optional[str] = ..., approvals: _Optional[_Iterable[_Union[Approval, _Mapping]]] = ...) -> None: ...

class ProposalRequest(_message.Message):
    __slots__ = ("configuration",)
    CONFIGURATION_FIELD_NUMBER: _ClassVar[int]
    configuration: int
    def __init__(self, configuration: _Optional[int] = ...) -> None: ...

class ProposalReply(_message.Message):
    __slots__ = ("configuration", "config_json", "changes", "proposed_json", "approvals")
    CONFIGURATION_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_JSON_FIELD_NUMBER: _ClassVar[int]
    APPROVALS_FIELD_NUMBER: _ClassVar[int]
    configuration: int
    config_json: str
    changes: _containers.RepeatedCompositeFieldContainer[ConfigChange]
    proposed_json: str
    approvals: _containers.RepeatedCompositeFieldContainer[Approval]
    def __init__(self, configuration: _Optional[int] = ..., config_json: _Optional[str] = ..., changes: _Optional[_Iterable[_Union[ConfigChange, _Mapping]]] = ..., proposed_json: _Optional[str] = ..., approvals: _Optional[_Iterable[_Union[Approval, _Mapping]]] = ...) -> None: ...

class ApproveReply(_message.Message):
    __slots__ = ("standing",)
    STANDING_FIELD_NUMBER: _ClassVar[int]
    standing: str
    def __init__(self, standing: _Optional[str] = ...) -> None: ...
