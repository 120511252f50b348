"""A tiny language model that can almost do a task: the start of RL where there is no GPU."""
