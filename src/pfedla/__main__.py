"""`python -m pfedla`: the command line."""

from pfedla.cli import main

if __name__ == "__main__":
    main()
