"""The lists of live replicas of a process."""

from __future__ import annotations

from deployments.transport.discovery import ReplicaBoard

KEY = ("app", "Worker")


def test_listeners_hear_what_is_known_and_what_changes_of_their_deployment() -> None:
    board, heard = ReplicaBoard(), []
    board.publish(KEY, ["a"])
    board.subscribe(KEY, heard.append)
    board.publish(KEY, ["b", "a"])
    board.publish(KEY, ["a", "b"])
    board.publish(("app", "Other"), ["c"])
    board.publish(KEY, [])
    assert heard == [{"a"}, {"a", "b"}, set()]


def test_a_replica_is_held_until_its_last_link_ends() -> None:
    board = ReplicaBoard()
    board.hold(b"1", "a")
    board.hold(b"2", "a")
    board.release(b"1")
    board.release(b"1")
    assert board.held() == {"a"}
    board.release(b"2")
    assert board.held() == set()
