"""Public datasets, one module each."""
