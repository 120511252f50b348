"""The rows that a run trains on: its files, the order in which their rows are drawn, and a curriculum of levels.
Begin with `files.py`."""
