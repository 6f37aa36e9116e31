"""Secure aggregation: Flower's SecAgg+ around a round."""
