"""Who this peer is.

Owns: the peer's folder with its key and certificate, and the call that redeems an invitation. Must not know: training, rounds.

enrolment      redeem an invitation
known_members  the members that this peer's operator knows
peer_folder    key, certificate, addresses
policy         what the site allows
renewal        keep the certificate renewed
"""
