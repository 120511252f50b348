"""New weights on their way from the trainer to the samplers. Begin with `manager.py`."""
