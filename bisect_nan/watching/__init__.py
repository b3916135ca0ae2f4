"""A training script under watch, unchanged: every step is recorded as it runs."""
