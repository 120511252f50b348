"""Files, folders, ids and lines that all rooms use; it imports no other room. Begin with `start_up.py`."""
