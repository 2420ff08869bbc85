"""The decoder: its configuration, its modules, its directory on disk. Knows `kernels`, no text and no training."""
