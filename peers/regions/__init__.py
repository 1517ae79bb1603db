"""Regions: a whole run, as one peer of a run above it (`edit-peer region`).

Owns: the daemon between the two runs, the calls to the run below, what was contributed last, on disk.
Must not know: what is computed (`edit.regional_peer`), how the run above is reached (`peers.carriers.hub`).

In reading order:
    daemon               starts and ends both connections; the loop that looks at both runs
    lower_run            the run below: its state, its outer parameters, what is injected into it
    last_contribution    a file that outlasts the process
"""
