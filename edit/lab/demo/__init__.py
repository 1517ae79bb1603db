"""`edit-lab demo`: train one model with real daemons, inject faults, compare with a lone peer, write a report.

Owns: the plan of the demo and its report. `edit.view` has its screen. Must not know: how a daemon works inside. In order:

command         runs it: prepare, start, follow, measure, write
plan            options, the run's settings, the planned faults
corpus          text for each peer, from Python's standard library
output_folder   the names of the files it leaves
daemons         the processes of the demo
faults          when which process is killed and restarted, and doing it
swarm           without a coordinator: the parts' rounds put together, what changes among the members
recorder        gathers all metrics files into one state
event_messages  one line per event, for people
evaluate        held-out losses and a sample of text
results         the results as numbers
report          report.html, and the results in the terminal
hostile         hostile peers: two runs, one with a robust rule, and the audit log verified
"""
