"""The content of Flower messages, for both sides: encoded payloads, client reports, message sizes."""
