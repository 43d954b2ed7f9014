"""The Hydra tree, as the package rolegraph.conf."""
