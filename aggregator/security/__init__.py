"""Who a peer is: the run's certificate authority, its members, and their invitations.

Owns: ca.pem, ca.key, server.pem/.key, operator.pem/.key, invitations/ and members.json of the coordinator's folder, and the
content of a certificate. Must not know: gRPC, rounds, the clock (`now`, in unix seconds, is an argument).

In reading order:
    certificates  keys and certificates as values: the authority signs, everybody else is signed
    members       members.json: who was ever enrolled, and who was evicted
    authority     the authority's files: creating, inviting, redeeming, renewing
    expiry        which certificates end soon
"""
