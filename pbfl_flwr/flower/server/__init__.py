"""The server side: the strategy, who takes part, what is sent, what comes back, and what a run records."""
