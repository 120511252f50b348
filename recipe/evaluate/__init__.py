"""How often a model solves a task's validation problems, `python -m recipe.evaluate`."""
