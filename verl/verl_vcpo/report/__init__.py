"""The words and numbers of a run while it trains and when it ends. Begin with `run_log.py`."""
