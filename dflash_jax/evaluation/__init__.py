"""Evaluation: how much of a drafter's proposals the target accepts."""
