"""Sampling N answers per prompt with one version of the weights, and what follows from them."""
