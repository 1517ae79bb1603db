"""`python -m aggregator`: the coordinator without an installed script."""

from aggregator.cli import main

if __name__ == "__main__":
    main()
