"""A tiny language model that can almost do a task: what RL starts from when there is no GPU."""
