"""One GPU that stands for several: trainer and samplers share it, each with processes of its own."""
