"""One folder per task: how its rows are made and how an answer is scored."""
