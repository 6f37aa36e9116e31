"""What travels in a Flower message, on both sides: payloads as bytes, a client's report, the count of bytes."""
