"""The evaluation of a model on a task's validation problems, `python -m recipe.evaluate`."""
