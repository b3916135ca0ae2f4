"""`python -m bisect_nan` is the command line `bisect-nan`."""

from bisect_nan.cli import main

if __name__ == "__main__":
    main()
