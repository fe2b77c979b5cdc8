"""`python -m autopar` is the `autopar` command."""

from __future__ import annotations

from autopar.cli import main

if __name__ == "__main__":
    main()
