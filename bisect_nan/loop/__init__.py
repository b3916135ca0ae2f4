"""The training loop under watch."""
