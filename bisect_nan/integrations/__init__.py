"""Other packages and their loops: each module here imports the package that it is named after, and nothing else does."""
