"""Run `nsa` as `python -m nsa_cli`."""

from nsa_cli.app import main

if __name__ == "__main__":  # worker processes import this file again under another name
    main()
