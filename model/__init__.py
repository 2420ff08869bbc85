"""The decoder: its configuration, its modules, its directory on disk and the device that it is on.

Knows `kernels`, no text and no training.
"""
