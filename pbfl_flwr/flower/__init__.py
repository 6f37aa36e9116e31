"""Everything that touches Flower's API: when Flower changes, this folder changes and nothing else."""
