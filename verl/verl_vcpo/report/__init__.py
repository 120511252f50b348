"""What a run says while it trains and when it ends. Begin with `run_log.py`."""
