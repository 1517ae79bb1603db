"""The Audit service of audit.proto: the audit log, and what merging an outer step once more takes, for auditors alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from aggregator.control.run import Run
from aggregator.services.authorization import Authorizer
from aggregator.services.readers import AuditReaders, send
from aggregator.storage.audit_files import AuditFile, audit_files
from aggregator.storage.state_folder import StateFolder
from edit.errors import RefusedError
from editpb import audit_pb2 as pb
from editpb.limits import CHUNK_BYTES, MAX_STEP, check_id, within
from editpb.transport.abort_on_error import abort_on_error

if TYPE_CHECKING:
    import grpc

    Context = grpc.aio.ServicerContext[Any, Any]

__all__ = ["AuditService"]


class AuditService:
    """Audit of audit.proto. Every call first authorizes its caller; an error that it raises is the status of the call."""

    def __init__(self, run: Run, authorizer: Authorizer, folder: StateFolder) -> None:
        self._run, self._authorizer, self._folder = run, authorizer, folder
        self._readers = AuditReaders()

    async def Fetch(self, request: pb.AuditRequest, context: Context) -> None:
        """Send the files, each as long as it was at the beginning.

        The call needs no deadline: one that is never read holds one message, and an auditor has one call.
        """
        async with abort_on_error(context):
            identity = self._authorizer.authorize(context, "auditor")
            self._run.check_run_id(check_id("run_id", request.run_id))
            step = within("outer_step", request.outer_step, 0, MAX_STEP)
            if not self._run.log_key:
                raise RefusedError("this run keeps no audit log (audit.enabled)")
            with self._readers.place(identity.peer_id) as place:
                files = await asyncio.to_thread(audit_files, self._folder, step, self._run.log_key)
                await send(context.write, self._parts(context, files), stalled=place.give_up)

    async def _parts(self, context: Context, files: Sequence[AuditFile]) -> AsyncGenerator[pb.AuditPart, None]:
        yield pb.AuditPart(files=pb.AuditFiles(files=[pb.AuditFile(name=each.name, bytes=each.size) for each in files]))
        for each in files:
            parts = each.parts(CHUNK_BYTES)
            while (data := await asyncio.to_thread(partial(next, parts, None))) is not None:
                self._authorizer.authorize(context, "auditor")
                yield pb.AuditPart(data=data)
