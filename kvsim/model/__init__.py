"""What a model is: shapes, storage types, the headers of GGUF files."""
