"""The decoder: its configuration, its modules, and the device it runs on.

Imports `kernels`; knows nothing of text, files or training.
"""
