"""Looking for inputs that make a loss non-finite."""

# Says what to install where hypothesis is missing, before anything here needs it.
from bisect_nan import strategies as strategies
