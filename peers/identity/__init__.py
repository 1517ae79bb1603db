"""Who this peer is.

Owns: the peer's folder with its key and certificate, and the call that redeems an invitation. Must not know: training, rounds.

enrolment    redeem an invitation
peer_folder  key, certificate, addresses
renewal      keep the certificate renewed
"""
