"""`python -m nsa_cli` is `nsa`."""

from nsa_cli.app import main

main()
