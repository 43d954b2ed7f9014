"""Reward functions, and the worker processes that run them under a deadline."""

from rolegraph.rewards.registry import reward

__all__ = ["reward"]
