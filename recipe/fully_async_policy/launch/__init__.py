"""How a run starts, ends and goes on: Ray, processes, earlier runs. Begin with `session.py`."""
