"""Rewards and tools that users wrote, in processes that can be killed at a limit. Begin with `killable.py`."""
