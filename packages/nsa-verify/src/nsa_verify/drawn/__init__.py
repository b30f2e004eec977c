"""Lines of text that describe cases, decode steps and histories: designs, judges, shrinking."""
