"""`edit-lab chaos`: a real run under faults drawn from a seed, watched from outside for what must never happen."""
