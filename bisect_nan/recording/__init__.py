"""A training step as it runs, written down call by call."""
