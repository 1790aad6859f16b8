"""A small but real transformer in NumPy over a real KV cache, driven by the same server as the simulation."""

from real_engine.engine import Engine
from real_engine.loading import LoadedModel, load_model
from real_engine.model import Transformer

__all__ = ["Engine", "LoadedModel", "Transformer", "load_model"]
