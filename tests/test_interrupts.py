"""Signals that end a run."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest

from pfedla.interrupts import SIGNALS, Stopped, stoppable, uninterrupted


def test_ctrl_c_is_held_back_until_the_block_is_done() -> None:
    done = []

    def work() -> None:
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            done.append(True)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_ctrl_c_nothing_happens() -> None:
    with uninterrupted():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_go_on_without_a_handler() -> None:
    seen: list[str] = []

    def work() -> None:
        with uninterrupted():
            seen.append("done")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == ["done"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_schedulers_and_terminals_send_is_as_ctrl_c(number: signal.Signals) -> None:
    done = []

    def work() -> None:
        with stoppable():
            with uninterrupted():
                os.kill(os.getpid(), number)
                done.append("held back")
            done.append("never")

    with pytest.raises(KeyboardInterrupt, match=number.name) as stopped:
        work()
    assert isinstance(stopped.value, Stopped)
    assert stopped.value.number == number
    assert done == ["held back"]
    assert signal.getsignal(number) == signal.SIG_DFL


def test_signals_that_somebody_else_handles_or_ignores_are_theirs() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with stoppable(), uninterrupted():
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGHUP)
            assert not heard
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGHUP, ignored)


def test_another_thread_changes_no_handler() -> None:
    seen: list[Any] = []

    def work() -> None:
        with stoppable(), uninterrupted():
            seen.extend(signal.getsignal(number) for number in SIGNALS)

    before = [signal.getsignal(number) for number in SIGNALS]
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == before
