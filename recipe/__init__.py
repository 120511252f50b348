"""What users run: tasks, presets and the warm start."""
