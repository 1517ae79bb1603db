"""`edit-lab chaos`: a real run under faults drawn from a seed, checked from outside.

Owns: the faults, their injection, and the invariants of a run. Must not know: how a daemon works; it uses command lines, files,
/proc and the operator's connection. In reading order:

options      the options and the settings of the run
faults       the kinds of faults, and the draw from a seed
testbed      the processes, links and disk; injects a fault and repairs it
disk         a disk that can be filled
history      what was seen of the run
invariants   what must hold, as pure functions of the history
harness      runs all of it
swarm        the same for a swarm whose members are on hosts of their own
swarm_rules  what was seen of it, and what must hold
outcome      the result as JSON and tables
command      the terminal
"""
