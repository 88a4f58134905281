"""Continuous batching on paged KV, in process: sequence, pages, scheduler, runner, weights, stops, engine."""

from zerogap.rollout.embedded.engine import EmbeddedEngine, EngineConfig

__all__ = ["EmbeddedEngine", "EngineConfig"]
