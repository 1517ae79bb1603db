"""Real runs for the commands in benchmarks/.

Owns: starting a run whose peers connect through links. Must not know: what is measured.

measured_run  a coordinator and peers as processes, and the same peers without any exchange
"""
