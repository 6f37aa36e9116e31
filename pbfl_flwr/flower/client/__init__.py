"""The client side: reply to the hello, load data, network and state for a message, train, save the state, reply."""
