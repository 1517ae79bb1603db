"""How a run is shown: `watch`'s screen, charts and numbers as text. The commands of both sides and the lab use it.

Owns: the state that a screen shows (`state`), from a `RunStatus` or from the lines of metrics files, and pure functions from it
to text. Must not know: where the values come from, and how they travel.
"""
