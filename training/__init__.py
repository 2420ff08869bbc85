"""One training run: settings, loop, optimizer, checkpoints, metrics, processes."""
