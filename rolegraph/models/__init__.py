"""Models: what a config names becomes a Hugging Face folder on this machine."""

from rolegraph.models.cache import cache_dir, ensure
from rolegraph.models.config import ModelConfig

__all__ = ["ModelConfig", "cache_dir", "ensure"]
