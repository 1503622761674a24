"""``python -m torchcrew``: the command ``torchcrew``."""

from torchcrew.cli import main

if __name__ == "__main__":
    main()
