"""Guards for the training loops of other packages: each module here imports the package that it is named after, and nothing else does."""
