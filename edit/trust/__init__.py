"""Proofs that do not depend on who carries them.

Owns: signatures of contributions. Must not know: messages, certificates, sockets, where keys lie. In `edit`, only this package
imports cryptography.
"""
