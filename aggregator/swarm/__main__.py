"""`python -m aggregator.swarm`."""

from edit.interrupts import end_at_interrupt


def main() -> None:
    """Entry point of `python -m aggregator.swarm`."""
    end_at_interrupt()

    from aggregator.swarm.cli import main as run

    run()


if __name__ == "__main__":
    main()
