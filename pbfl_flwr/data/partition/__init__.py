"""How samples are assigned to simulated clients."""
