"""The decoder: its configuration, its modules, and its device. Knows nothing of text, files or training."""
