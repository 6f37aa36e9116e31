"""Files, locks, paths, memory and user code: small helpers that know nothing of federated learning."""
