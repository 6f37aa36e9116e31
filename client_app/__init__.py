"""The Flower ClientApp."""
