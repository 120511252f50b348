"""What lab.step_overhead, lab.layer_overhead, lab.update_operations and lab.overlap measure with."""
