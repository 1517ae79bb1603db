from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AuditRequest(_message.Message):
    __slots__ = ("run_id", "outer_step")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    OUTER_STEP_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    outer_step: int
    def __init__(self, run_id: _Optional[str] = ..., outer_step: _Optional[int] = ...) -> None: ...

class AuditFile(_message.Message):
    __slots__ = ("name", "bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    bytes: int
    def __init__(self, name: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...

class AuditFiles(_message.Message):
    __slots__ = ("files",)
    FILES_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedCompositeFieldContainer[AuditFile]
    def __init__(self, files: _Optional[_Iterable[_Union[AuditFile, _Mapping]]] = ...) -> None: ...

class AuditPart(_message.Message):
    __slots__ = ("files", "data")
    FILES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    files: AuditFiles
    data: bytes
    def __init__(self, files: _Optional[_Union[AuditFiles, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...
