"""What is checked before a process starts, a file for each kind of input. Begin with `validate.py`."""
