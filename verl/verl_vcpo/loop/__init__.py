"""The lag-k training loop. Begin with `trainer.py`: its docstring is the loop in six lines."""
