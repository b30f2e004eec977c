"""The jobs of `nsa verify`: checks on cases, their order, and the processes that run them."""
