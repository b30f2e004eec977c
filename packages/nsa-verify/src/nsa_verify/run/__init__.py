"""The jobs of `nsa verify`: checks on cases, their order, and the processes that run them."""

# Modules that worker processes need. The second one imports torch._dynamo, which takes two seconds.
PRELOADED = ("nsa_verify.run.workers", "nsa_core.cache.step")
