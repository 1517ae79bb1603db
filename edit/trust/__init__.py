"""Proofs that do not depend on who carries them.

Owns: signatures of contributions; the Merkle tree of a log, its signed heads, the text of its entries. Must not know: messages,
certificates, sockets, where keys lie. In `edit`, only this package imports cryptography.
"""
