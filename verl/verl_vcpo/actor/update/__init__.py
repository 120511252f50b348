"""One update: facts of the mini-batch, a measuring pass, and the gradient. Begin with `mini_batch.py`."""
