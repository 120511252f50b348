"""Attacks on the sandbox, malformed requests and floods: `python -m sandbox.attacks`. Begin with `trial.py`."""
