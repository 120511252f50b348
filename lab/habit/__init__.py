"""Does a method unlearn a wrong habit? Begin with tasks.py, and with predictions.md for what was expected."""
