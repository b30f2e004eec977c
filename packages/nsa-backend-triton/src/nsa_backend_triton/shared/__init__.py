"""Device code that several slots share."""
