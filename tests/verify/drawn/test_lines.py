"""Lines: what is drawn comes back from its line, and a wrong line names the key and the value."""

from __future__ import annotations

import pytest

from nsa_core.contract import DTYPES
from nsa_core.errors import InvalidInput
from nsa_verify.drawn.draw import DESIGNS, draw
from nsa_verify.drawn.jobs import job_of
from nsa_verify.drawn.parser import KINDS, is_line, parse
from nsa_verify.drawn.shrink import ShrinkBudget
from nsa_verify.run import suite


@pytest.mark.parametrize("name", DESIGNS)
def test_what_is_drawn_comes_back_from_its_line(name: str) -> None:
    drawn = draw(name, "quick", DTYPES)
    for one in drawn:
        one.check()
        assert parse(str(one)) == one
        assert is_line(str(one))
        assert "first_query=" in str(one) or not name.startswith("partial")
    assert len(set(map(str, drawn))) == len(drawn) > 10


@pytest.mark.parametrize("name", KINDS)
def test_defaults_are_left_out_of_a_line(name: str) -> None:
    assert str(parse(name)) == name


EXAMPLE = "cache scale=-0.7 compress=linear batch=2 page_size=4 step=5,0+2 save=0 load=0,1 crop=5,4"


def test_words_of_a_line_may_come_in_any_order() -> None:
    first, *words = EXAMPLE.split()
    keys, operations = words[:4], words[4:]
    assert str(parse(" ".join([first, *operations, *keys[::-1]]))) == EXAMPLE


@pytest.mark.parametrize(
    ("line", "slot"),
    [
        ("win dtype=float16 w=5 tokens=9", "win"),
        ("decode lengths=9,5 new=1,1", ""),
        ("cache batch=2 step=5,3", ""),
    ],
)
def test_a_check_that_does_not_end_names_the_line_that_repeats_it(line: str, slot: str) -> None:
    budget = ShrinkBudget(0)
    failure = job_of(parse(line), "case 7", suite.Job, budget).failure("killed its process")
    assert (failure.case, failure.slot, failure.ok) == (line, slot, False)


@pytest.mark.parametrize("text", ["", "case 7", "sel 7", "history 2", "S=w", "layer compress=mlp"])
def test_names_of_other_cases_are_no_lines(text: str) -> None:
    assert not is_line(text)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "must begin with one of cmp, select"),
        ("tokens=5", "must begin with one of cmp, select"),
        ("wim", "did you mean 'win'"),
        ("win tokens", "'tokens' must be key=value"),
        ("win token=5", "win has no key 'token'; did you mean 'tokens'"),
        ("win lengths=5", "win has no key 'lengths'; its keys are dtype, l,"),
        ("win step=5", "win has no key 'step'"),
        ("win w=1 w=2", "w stands twice"),
        ("win w=0", "w must be an integer from 1 to 1048576, got '0'"),
        ("win w=2.0", "w must be an integer from 1"),
        ("win dtype=fp16", "float64, got 'fp16'"),
        ("win scale=nan", "scale must be a finite number or none, got 'nan'"),
        ("win documents=1,x", "such as 0,5,1, got '1,x'"),
        ("win documents=1,2 batch=2", "leave tokens and batch out"),
        ("win frozen=gate", "frozen must be names joined by commas, of q,"),
        ("win frozen=gates", "frozen must name some but not all of q, k, v, got gates"),
        ("win recompute=on", "recompute=on needs core, got win"),
        ("sel blocks=messy8", "blocks=messy8 needs block_attention, got sel"),
        ("select poison=nan_v", "poison=nan_v: a NaN or Inf of select may be in q, k"),
        ("core poison=nan_q", "poison=nan_q: a NaN or Inf of core may be in no tensor"),
        ("cmp l=6 d=4 block=8", "compress_stride"),
        ("win tokens=5 queries=2", "queries=2 needs first_query"),
        ("win tokens=5 first_query=6", "must lie in the 5 rows of keys"),
        ("win tokens=5 first_query=2 queries=4", "the queries 2 .. 6 must lie in the 5 rows"),
        ("win documents=2,3 first_query=5 queries=1", "must lie in the 5 rows of keys"),
        ("win tokens=5 first_query=-1", "first_query must be an integer from 0"),
        ("combine tokens=5 first_query=1", "combine takes whole sequences"),
        ("core tokens=5 first_query=1", "core takes whole sequences"),
        ("decode tokens=5", "decode has no key 'tokens'"),
        ("decode lengths=0", "one of lengths must be at least 1"),
        ("decode lengths=3,4", "new must have one entry per sequence"),
        ("decode lengths=3,4 new=1,2", "at most its length and rows=1"),
        ("decode page_size=6 block=4", "page_size must be a multiple of block=4, got 6"),
        ("decode starts=default", "decode has no key 'starts'"),
        ("block_attention_decode lengths=5 rows=3 new=2 starts=default", "needs new=3"),
        ("cache step", "'step' must be key=value"),
        ("cache stpe=1", "cache has no key 'stpe'; did you mean 'step'?"),
        ("cache batch=two", "batch must be an integer from 1 to 1048576, got 'two'"),
        ("cache batch=-1", "batch must be an integer from 1 to 1048576, got '-1'"),
        ("cache batch=2 batch=2", "batch stands twice"),
        ("cache batch=2 step=1", "step=1 must have 2 integers (one per sequence of the batch)"),
        ("cache load=0", "load=0 must have 2 integers"),
        ("cache crop=1+2", "only a step has rows of padding"),
        ("cache step=1,x", "step must be integers of 0 to 1048576 joined by commas"),
        ("cache rope=yes", "rope must be one of after, before, none, got 'yes'"),
        ("cache qk_norm=yes", "qk_norm must be off or on, got 'yes'"),
        ("cache scale=big", "scale must be a finite number or none, got 'big'"),
        ("cache d=3", "compress_stride"),
    ],
)
def test_a_wrong_line_is_refused(line: str, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse(line)
    assert message in str(caught.value)
