"""The decoder: its configuration, its modules, its checkpoint directory on disk, and the device it runs on.

Imports `kernels`; knows nothing of text or training.
"""
