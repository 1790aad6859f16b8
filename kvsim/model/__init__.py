"""Models: their shapes, storage types, and the headers of GGUF files."""
