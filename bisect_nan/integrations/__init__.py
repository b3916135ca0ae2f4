"""Frameworks: each module imports its framework, and nothing else does."""
