"""The processes of the trainer: their ports, their deaths, their long work and their end."""
