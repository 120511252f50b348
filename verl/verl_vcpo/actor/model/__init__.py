"""The trainer's model: layers that run without a GPU, adapters, and Hugging Face files. Begin with
`local_layers.py`."""
