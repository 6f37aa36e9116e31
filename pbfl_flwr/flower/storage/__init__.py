"""Files: run directories and their histories, client states, checkpoints, atomic writing."""
