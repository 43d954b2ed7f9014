"""Engines that sample from the policy."""
