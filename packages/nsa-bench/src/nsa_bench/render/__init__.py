"""Tables, plots and HTML pages from result files."""
