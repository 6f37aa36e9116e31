"""From presets, comparisons, sweeps and reproductions to checked lists of runs."""
