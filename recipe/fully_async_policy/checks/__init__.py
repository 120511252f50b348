"""What is checked before a process starts, one file for each kind of input. `validate.py` calls them in order."""
