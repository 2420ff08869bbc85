"""Comparisons between arms that differ in one setting: what was measured, how sure it is, what it cannot tell."""
