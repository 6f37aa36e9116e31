"""The server side: strategy, client membership, messages, replies, and the recording of a run."""
