"""A small but real transformer in NumPy over a real KV cache, driven by the same server as the simulation."""

from real_engine.engine import Engine, best_without_cache, generate_without_cache
from real_engine.loading import LoadedModel, load_model
from real_engine.model import Transformer

__all__ = ["Engine", "LoadedModel", "Transformer", "best_without_cache", "generate_without_cache", "load_model"]
