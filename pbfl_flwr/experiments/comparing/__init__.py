"""Many runs as one table: comparisons, reproductions of published tables, sweeps."""
