"""The checks of `nsa verify`, one family a file."""
