"""`edit-coordinator`, and `python -m aggregator`: the same without an installed script."""

from edit.interrupts import end_at_interrupt


def main() -> None:
    """Entry point of `edit-coordinator`."""
    end_at_interrupt()

    from aggregator.cli import main as run

    run()


if __name__ == "__main__":
    main()
