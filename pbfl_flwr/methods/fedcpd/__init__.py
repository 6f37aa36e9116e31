"""FedCPD with its attention module."""
