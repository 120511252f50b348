"""The sampling side: from a prompt to a response with its log-probs. Begin with `agent_loop.py`."""
