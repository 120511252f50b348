"""Per-sequence gradient norms on every parallel layout. Begin with `update.py`: norms and gradient of one update."""
