"""FedGen and FedPA, and the generators that both train."""
