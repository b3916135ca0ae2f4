"""From the operations to blame to what a user reads."""
