"""Serve an NSA model over HTTP with `transformers serve`; the options are those of its command.

python examples/transformers_serve.py MODEL --port 8000   # a folder of nsa convert
"""

import transformers
from transformers.cli.transformers import main  # it replaces the module transformers: keep it first

import nsa_models.hf

for name in nsa_models.hf.__all__:  # the server looks classes up by name in transformers
    if name.endswith("ForCausalLM"):
        setattr(transformers, name, getattr(nsa_models.hf, name))

if __name__ == "__main__":
    import sys

    sys.argv.insert(1, "serve")
    main()
