"""`edit-lab`: the project at work on one machine.

Owns: what needs a coordinator and peers at once, so it is the only place that imports both `aggregator` and `peers`. It starts
real daemons as subprocesses; only the simulator runs their sans-IO parts directly. Must not know: how they work inside. In
reading order:

cli           the options and their help
demo/         train one model with faults, and report
chaos/        random faults, checked invariants
simulation/   thousands of peers in virtual time
bench/        measurements beside a limit or other systems in the same run
processes     child processes: start, watch, kill, end all of them
procfs        processes as /proc shows them
link          a TCP proxy with a bounded rate, latency, cuts and losses
network       hosts in namespaces of this machine, each behind a link of a limited rate
joining       enrol a peer that connects through a link
observer      the operator's connection: status and snapshot
swarm_observer  the same for the hosts of a swarm, and what lies in their folders
observations  points of a curve, and a status
tail          follow a growing file of JSON lines
run_toml      write a run.toml
charts        charts and pictures as SVG
units         bytes, durations and curves as text
"""
