"""Tables, plots and HTML pages made from result files."""
