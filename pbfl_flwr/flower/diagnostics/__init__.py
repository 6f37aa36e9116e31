"""Checks before a run: this machine and its connection to the SuperLink."""
