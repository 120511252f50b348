"""Lines for the person at the terminal, in whichever process they arise."""

import sys

from tqdm import tqdm


def print_line(text: str) -> None:
    """Print above the progress bar, and on the terminal even while what verl prints goes to a file."""
    stream = sys.__stdout__ or sys.stdout
    tqdm.write(text, file=stream)
    stream.flush()
