"""The gRPC services of one aggregator: thin mappings of control.proto, data.proto and enrolment.proto to calls of the run.

Owns: who may call (before anything else of a request is read), the order of messages on a stream, and that every error
becomes a status of one line. Must not know: how rounds, leases or merges work.

In reading order:
    authorization  who may call: the certificate of the connection decides
    call_limit     how many calls one member has under way, whatever they ask
    control        Control: one stream per rank, and the operator's calls
    watching       the status again and again, for those who watch
    data           Data: contributions up; updates, snapshots and the founder's parameters
    metrics_page   /metrics, /healthz and /readyz, over HTTP
    enrolment      Enrolment: an invitation in, a certificate out; the one service without client certificates
"""
