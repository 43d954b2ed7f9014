"""Outcome rewards: one number a response and reward function."""
