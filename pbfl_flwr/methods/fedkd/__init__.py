"""FedKD with its low-rank compression."""
