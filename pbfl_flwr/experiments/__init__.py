"""What the command line needs around a run: presets, configurations, following a run, tables."""
