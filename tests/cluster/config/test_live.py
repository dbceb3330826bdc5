from __future__ import annotations

import logging

from cluster.config.app import AppArgs
from cluster.config.base import keys_of
from cluster.config.live import LIVE_KEYS, reconfigured, set_log_level

ARGS = AppArgs.model_validate(
    {"target": {"model": "t", "token": "secret"}, "limits": {"retry_after_s": 7, "max_sequences": 3}}
)


def test_what_a_user_config_does_not_name_stays():
    changed = reconfigured(ARGS, {"limits": {"retry_after_s": 2}, "num_branches": 5})
    assert changed.limits.retry_after_s == 2
    assert changed.limits.max_sequences == 3
    assert changed.num_branches == 5
    assert changed.target == ARGS.target
    assert reconfigured(ARGS, {"access": {"admin_keys": ["a"]}, "replicas": {"target": 2}}).access.admin_keys == ("a",)
    assert reconfigured(ARGS, {}) == ARGS
    assert reconfigured(ARGS, None) == ARGS


def test_the_log_level_goes_back_to_serves_own(monkeypatch):
    serve, library = logging.getLogger("ray.serve"), logging.getLogger("specdec")
    for logger in (serve, library):  # what is set is undone
        monkeypatch.setattr(logger, "level", logging.WARNING)
    monkeypatch.setattr(library, "handlers", [])
    for user_config, level in (({"log_level": "debug"}, logging.DEBUG), ({}, logging.WARNING)):
        set_log_level(reconfigured(ARGS, user_config), logging.WARNING)
        assert serve.level == library.level == level


def test_live_keys_are_keys_and_decide_no_token():
    assert set(LIVE_KEYS) <= {path for path, _ in keys_of(AppArgs)}
    deciding = {"demo", "target", "draft", "logits_processors", "chat_template", "backend"}
    deciding |= {"exactness", "strict_tile_tokens"}
    assert not deciding & set(LIVE_KEYS)


def test_what_the_library_logs_goes_to_serves_log(monkeypatch):
    kept: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", kept.append)
    serve, library = logging.getLogger("ray.serve"), logging.getLogger("specdec")
    monkeypatch.setattr(serve, "handlers", [handler])
    for logger in (serve, library):  # what is set is undone
        monkeypatch.setattr(logger, "level", logger.level)
    monkeypatch.setattr(library, "handlers", [])
    for level, wanted in (("info", ["a step", "a row"]), ("error", ["a step"])):
        set_log_level(AppArgs.model_validate({"log_level": level}))
        logging.getLogger("specdec.protocol.target").error("a step")
        logging.getLogger("specdec.protocol.router").info("a row")
        assert [record.getMessage() for record in kept] == wanted
        kept.clear()
