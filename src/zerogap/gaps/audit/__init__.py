"""Audit of rollouts from any engine: read, score again, tell the two gaps apart, name the cause."""
