"""Untrusted text on one line."""

from __future__ import annotations

from nsa_core.util.text import describe_error


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError


def test_an_error_is_its_type_and_its_message_on_one_line() -> None:
    assert describe_error(ValueError("two\nlines\tand \x1b")) == "ValueError: two lines and \\x1b"
    assert describe_error(KeyError()) == "KeyError"
    assert describe_error(Unprintable()) == "Unprintable: (the message cannot be printed)"


def test_the_advice_after_a_cuda_error_is_left_out() -> None:
    first = "CUDA error: misaligned address"
    for advice in (
        "Search for `cudaErrorMisalignedAddress' in https://docs.nvidia.com for more information.",
        "CUDA kernel errors might be asynchronously reported at some other API call",
    ):
        error = RuntimeError(f"{first}\n{advice}\nFor debugging consider passing ...")
        assert describe_error(error) == f"RuntimeError: {first}"
