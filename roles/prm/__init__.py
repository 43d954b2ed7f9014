"""Process rewards: a number for each step of a response."""
