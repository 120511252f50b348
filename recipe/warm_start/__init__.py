"""A tiny language model that can almost play Countdown: what RL starts from when there is no GPU."""
