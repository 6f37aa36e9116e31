"""All code that uses Flower's API, so that a change in Flower only affects this folder."""
