"""A located fault as a short script of torch calls that fails in the same way."""
