"""`edit-lab demo`: train one model with real daemons, inject faults, compare with a lone peer, write a report.

Owns: the plan of the demo, its state, its screen and its report. Must not know: how a daemon works inside. In reading order:

command         runs it: prepare, start, follow, measure, write
plan            options, the run's settings, the planned faults
corpus          text for each peer, from Python's standard library
output_folder   the names of the files it leaves
daemons         the processes of the demo
faults          when which process is killed and restarted, and doing it
swarm           without a coordinator: the parts' rounds put together, what changes among the members
recorder        gathers all metrics files into one state
state           what is known of the running demo
event_messages  one line per event, for people
evaluate        held-out losses and a sample of text
results         the results as numbers
display         the live screen, or lines where there is no terminal
screen          what the live screen shows
report          report.html, and the results in the terminal
"""
