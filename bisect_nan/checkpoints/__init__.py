"""Folders of checkpoints, and which of them is the first whose numbers are spoilt."""
