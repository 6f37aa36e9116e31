"""Many runs as one table: comparisons, published tables made again, sweeps."""
