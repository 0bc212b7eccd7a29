"""Who hears of a signal that asks to stop."""

import signal

from mheads.common.signals import handling


def test_the_inner_one_hears_of_a_signal_and_the_outer_one_once_that_has_ended_as_if_nothing_was():
    heard = []
    with handling(lambda number: heard.append(("outer", number))):
        with handling(lambda number: heard.append(("inner", number)), once=True):
            signal.raise_signal(signal.SIGTERM)
            assert heard == [("inner", signal.SIGTERM)]
        assert heard[1:] == [("outer", signal.SIGTERM)]
        with handling(heard.append):
            pass
    assert len(heard) == 2


def test_the_outer_one_hears_nothing_where_the_inner_one_stops():
    heard = []
    with handling(lambda number: heard.append(("outer", number))):
        try:
            with handling(lambda number: heard.append(("inner", number))):
                signal.raise_signal(signal.SIGTERM)
                raise KeyError
        except KeyError:
            pass
    assert heard == [("inner", signal.SIGTERM)]


def test_a_second_signal_goes_to_the_outer_one():
    heard = []
    with handling(lambda number: heard.append("outer")):
        try:
            with handling(lambda number: heard.append("inner"), once=True):
                signal.raise_signal(signal.SIGTERM)
                signal.raise_signal(signal.SIGTERM)
                raise KeyError
        except KeyError:
            pass
    assert heard == ["inner", "outer"]
