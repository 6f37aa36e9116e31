"""GFPL with its mixtures, classifier frame and payload."""
