"""The composition root: demo, simulation, chaos, plan, bench."""
