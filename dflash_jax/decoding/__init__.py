"""Decoding: one compiled loop of propose, verify, accept, commit."""
