"""`python -m peers` is `edit-peer`."""

from peers.cli import main

if __name__ == "__main__":
    main()
