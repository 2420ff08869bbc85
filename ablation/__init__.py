"""Comparisons of norms and other choices: plan, paired runs, statistics, verdicts and a report."""
