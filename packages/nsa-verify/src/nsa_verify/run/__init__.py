"""Which checks run on which cases, in which order, in how many processes."""
