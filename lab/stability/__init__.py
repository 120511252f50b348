"""Which method is stable at which lag. Begin with `__main__.py`."""
