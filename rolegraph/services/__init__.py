"""Models behind an address: chat requests to any OpenAI-compatible endpoint."""

from rolegraph.services.config import ClientConfig, ServiceConfig

__all__ = ["ClientConfig", "ServiceConfig"]
