"""The client side: answer the hello, open what a message needs, train, keep the state, reply."""
