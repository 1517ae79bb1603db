"""EDiT: local SGD with layer-wise exchange and a pseudo-gradient penalty."""
