"""Turns graded trajectories into weight updates: advantage, objective, packing, optimizer, statistics, warm start."""
