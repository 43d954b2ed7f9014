"""Data: rows from files, hubs and generated tasks become prompts in the model's own tokens."""

from rolegraph.data.config import DataConfig

__all__ = ["DataConfig"]
