"""Models that draw the candidates of a sampling graph."""
