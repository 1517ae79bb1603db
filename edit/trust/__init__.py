"""Proofs that do not depend on who carries them.

Owns: signatures of contributions; the Merkle tree of a log, its signed heads, the text of its entries; masked sums (`masking`
is the machine of their round); what differential privacy costs, its ledger and its noise. Must not know:
messages, certificates, sockets, where keys lie. In `edit`, only this package imports cryptography.
"""
