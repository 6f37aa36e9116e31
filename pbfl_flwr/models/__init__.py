"""Architectures: the registry of names (without torch), one module per family, and how a network is built."""
