"""Looks at models, batches, checkpoints and healthy steps before anything fails."""
