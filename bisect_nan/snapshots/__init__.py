"""A recorded step as a file."""
