"""The configuration of a run: frozen, validated values, and their TOML and JSON forms.

Owns every setting, its default, its bounds and the message for a wrong one. Must not know the environment, the network, or any
file but the one it is given.

    validation  bounds, types, unknown keys: how a setting is checked and what its error says
    algorithm   the sections sync, penalty, outer, rounds
    codec       the section codec, and the text that names a codec
    run         the other sections, and the whole
    auto        the outer optimizer from a run's length
    presets     named settings of published methods
"""
