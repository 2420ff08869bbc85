"""Comparisons of norms and other choices: plan, paired runs, statistics, claims and a report."""
