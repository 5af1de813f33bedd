"""`python -m umbp` is `umbp`."""

from umbp.cli import main

if __name__ == "__main__":
    main()
