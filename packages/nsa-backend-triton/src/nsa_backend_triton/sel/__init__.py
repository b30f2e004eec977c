"""sel: attention over the selected blocks."""
