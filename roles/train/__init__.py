"""Train roles, one module a backend."""
