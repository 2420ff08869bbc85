"""One run: settings, loop, optimizer, state on disk, metrics, processes."""
