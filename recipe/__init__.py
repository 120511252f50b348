"""What users run. Begin with `fully_async_policy/main.py`, which trains."""
