"""`python -m edit.lab.hostile`."""

from edit.lab.hostile.process import main

if __name__ == "__main__":
    main()
