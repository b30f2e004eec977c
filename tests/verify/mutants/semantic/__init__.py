"""Semantic mutants: wrappers around healthy slot functions that compute what a faulty kernel could.

They are written from SEMANTICS (docs/explanation/semantics.md) and from nsa_core.contract, without
a look at the checks that must find them. Each changes a number that a user sees.
"""
