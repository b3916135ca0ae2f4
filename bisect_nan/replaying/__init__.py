"""A recorded step run again, in part or with changes."""
