"""``specdec serve`` that is told twice to end."""

from __future__ import annotations

import signal


def test_a_second_ctrl_c_ends_everything_at_once(start):
    service = start()
    service.read_until("Ctrl-C stops it.")
    service.process.send_signal(signal.SIGINT)
    service.read_until("stopping")
    service.process.send_signal(signal.SIGINT)
    assert service.end() == 130
    assert service.processes() == []
