from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class EnrolRequest(_message.Message):
    __slots__ = ("token", "csr_der")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    CSR_DER_FIELD_NUMBER: _ClassVar[int]
    token: str
    csr_der: bytes
    def __init__(self, token: _Optional[str] = ..., csr_der: _Optional[bytes] = ...) -> None: ...

class EnrolReply(_message.Message):
    __slots__ = ("certificate_der", "ca_der", "run_id", "peer_id", "role", "endpoints")
    CERTIFICATE_DER_FIELD_NUMBER: _ClassVar[int]
    CA_DER_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    certificate_der: bytes
    ca_der: bytes
    run_id: str
    peer_id: str
    role: str
    endpoints: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, certificate_der: _Optional[bytes] = ..., ca_der: _Optional[bytes] = ..., run_id: _Optional[str] = ..., peer_id: _Optional[str] = ..., role: _Optional[str] = ..., endpoints: _Optional[_Iterable[str]] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RenewReply(_message.Message):
    __slots__ = ("certificate_der",)
    CERTIFICATE_DER_FIELD_NUMBER: _ClassVar[int]
    certificate_der: bytes
    def __init__(self, certificate_der: _Optional[bytes] = ...) -> None: ...
