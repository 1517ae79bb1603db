"""The council of a swarm (`edit.council`) in virtual time: members with disks, a network, faults, and what must hold.

The machines are real; the shell around them, the disks, the engines and the network are simulated. The same seed gives the same
run. `benchmarks/swarm/council.py` runs thousands of seeds.

In reading order:
    plan     what is drawn from a seed: the swarm, its network, its faults
    swarm    the members, their disks and the network
    truth    what must hold at every moment, and after healing
    search   runs seeds, and makes the plan of one that fails as small as it can
"""
