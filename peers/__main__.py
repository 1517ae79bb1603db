"""`edit-peer`, and `python -m peers`: the same without an installed script."""

from edit.interrupts import end_at_interrupt


def main() -> None:
    """Entry point of `edit-peer`."""
    end_at_interrupt()

    from peers.cli import main as run

    run()


if __name__ == "__main__":
    main()
