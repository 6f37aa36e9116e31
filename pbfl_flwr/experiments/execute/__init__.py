"""Execution of planned runs, and their progress on the screen."""
