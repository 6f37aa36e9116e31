"""The client side: reply to the handshake, load data, network and state for a message, train, save the state, reply."""
