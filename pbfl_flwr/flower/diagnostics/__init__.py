"""Checks before a run: this machine and the way to the SuperLink."""
