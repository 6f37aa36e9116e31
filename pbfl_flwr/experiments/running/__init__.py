"""From a preset to a run and its progress on the screen."""
