"""``python -m graphdnn``: the command line."""

from graphdnn.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
