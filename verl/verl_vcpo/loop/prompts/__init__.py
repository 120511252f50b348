"""The prompts of a run, from the queue to the batch: lag bound, failures, filters and order."""
