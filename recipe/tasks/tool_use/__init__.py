"""Long-horizon tool use: mathematics with a Python interpreter, in the manner of SimpleTIR."""
