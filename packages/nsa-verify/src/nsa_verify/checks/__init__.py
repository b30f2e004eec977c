"""The checks of `nsa verify`, one family per file."""
