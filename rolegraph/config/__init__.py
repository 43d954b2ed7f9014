"""Composing, filling, checking and deriving a run's config. Light: nothing here imports torch, Ray or an engine."""

from rolegraph.config.load import Loaded, load, load_saved
from rolegraph.config.schema import LoggerConfig, RootConfig, RunConfig, Spec

__all__ = ["Loaded", "LoggerConfig", "RootConfig", "RunConfig", "Spec", "load", "load_saved"]
