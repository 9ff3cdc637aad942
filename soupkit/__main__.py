"""`python -m soupkit` is the command line."""

from soupkit.cli import main

if __name__ == "__main__":
    main()
