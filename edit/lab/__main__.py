"""`edit-lab`, and `python -m edit.lab`: the same without an installed script."""

from edit.interrupts import end_at_interrupt


def main() -> None:
    """Entry point of `edit-lab`."""
    end_at_interrupt()

    from edit.lab.cli import main as run

    run()


if __name__ == "__main__":
    main()
