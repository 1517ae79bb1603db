"""Hostile members and strangers, for `edit-lab chaos --hostile` and benchmarks/attacks.py.

Owns: what an attacker does, and the process that does it (`python -m edit.lab.hostile`). It has real certificates, from real
invitations, but none of the honest client's checks: it speaks the stubs of editpb. Must not know: the coordinator's internals.
In reading order:

home           the folder of an attacker: the identities it has, and enrolling them
member         one connection under a certificate, and an attendance that says what it is told to
claims         what a member says of itself: step times, ranks, a large first message, calls after an eviction
contributions  what a member contributes: damaged, unfinished, or numbers that hurt
reading        snapshots that are asked for and not read
strangers      what can be done without a certificate
catalogue      all behaviours by name
process        changes from one behaviour to the next
"""
