"""Experiments: scripts that import the packages, and a folder of plan, records and report for each comparison."""
