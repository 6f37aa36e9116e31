"""Engines that start a run: Flower's simulation engine, local worker processes, or SuperLink and SuperNodes."""
