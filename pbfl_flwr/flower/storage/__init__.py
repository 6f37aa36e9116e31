"""What stays on disk: a run's directory and history, client states, checkpoints, and how files are written."""
