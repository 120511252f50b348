"""The weights' way from the trainer to the samplers. Begin with `manager.py`."""
