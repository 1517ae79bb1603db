"""`edit-lab simulate`: the real round machine, membership and session in virtual time, with thousands of peers."""
