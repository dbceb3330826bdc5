"""One token's way through a running service: which of our functions run for each token, and which types are made.

    python -m benchmarks.token_way [--specdec PATH] [--tokens 200]

Starts ``specdec serve`` with the plain demo pair and counts every call in every process while one stream decodes
without drafts. What runs at least once for two tokens is on the way. ``--specdec`` names another version's
command, in an environment of its own, to compare with.

A type counts as made where its ``__init__`` runs. One that is made in C (a msgspec struct, a named tuple) counts where
a function on the way calls it by name: an upper bound, since the call may stand on another branch.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2

PACKAGES = ("specdec", "cluster", "deployments")
LEAST_SHARE = 0.5
WRITE_EVERY_S = 0.5
COUNTER = f"""
import json, os, sys, threading, time
_FOLDER, _PACKAGES = os.environ["TOKEN_WAY_FOLDER"], {PACKAGES!r}
_counts, _where, _kept = {{}}, {{}}, {{}}

def _name(code, frame):
    if code.co_name == "__init__":  # a dataclass's is made by exec, and has no name of its own
        owner = type(frame.f_locals.get(code.co_varnames[0]))
        name, function = owner.__module__, owner.__qualname__ + ".__init__"
    else:
        name, function = frame.f_globals.get("__name__") or "", code.co_qualname
    return name + ":" + function if name.split(".")[0] in _PACKAGES else None

def _on(frame, event, argument):
    if event == "call":
        code = frame.f_code
        try:
            _counts[code] += 1
        except KeyError:
            _counts[code] = 1
            _kept[code] = frame.f_globals
            _where[code] = _name(code, frame)

def _made_in_c(code):
    found = set()
    for name in code.co_names:
        value = _kept[code].get(name)
        if isinstance(value, type) and value.__module__.split(".")[0] in _PACKAGES:
            if hasattr(value, "__struct_fields__") or hasattr(value, "_fields"):
                found.add(value.__module__ + ":" + value.__qualname__)
    return sorted(found)

def _write():
    while True:
        time.sleep({WRITE_EVERY_S})
        rows = {{}}
        for code, count in list(_counts.items()):
            name = _where.get(code)
            if name is not None:
                row = rows.setdefault(name, [0, []])
                row[0] += count
                row[1] = _made_in_c(code)
        if rows:
            path = os.path.join(_FOLDER, str(os.getpid()) + ".json")
            with open(path + ".new", "w") as file:
                json.dump(rows, file)
            os.replace(path + ".new", path)

threading.Thread(target=_write, daemon=True).start()
threading.setprofile(_on)
sys.setprofile(_on)
"""


def main() -> int:
    """Print the way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--specdec", default=shutil.which("specdec") or str(Path(sys.executable).with_name("specdec")))
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--list", action="store_true", help="name every function and type")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(COUNTER)
        counts, made = _measure(arguments.specdec, folder, arguments.tokens)
    files = {name.partition(":")[0] for name in counts}
    print(f"functions {len(counts)}, files {len(files)}, calls a token {sum(counts.values()):.0f}, types {len(made)}")
    if arguments.list:
        for name, share in sorted(counts.items()):
            print(f"{share:7.2f}  {name}")
        print(*sorted(made), sep="\n")
    return 0


def _measure(command: str, folder: str, num_tokens: int) -> tuple[dict[str, float], set[str]]:
    environment = os.environ | {"PYTHONPATH": folder, "TOKEN_WAY_FOLDER": folder}
    service = subprocess.Popen(
        [command, "serve", "--port", "0"], stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    try:
        assert service.stdout is not None
        found = (re.search(r"http://127.0.0.1:\d+(?=/v1)", line) for line in service.stdout)
        url = next(match[0] for match in found if match)
        _ask(url, num_tokens)  # whatever happens once
        before = _read(folder)
        idle_s = 5.0
        time.sleep(idle_s)
        idle = _read(folder)
        began_s = time.monotonic()
        _ask(url, num_tokens)
        spent_s = time.monotonic() - began_s + 3 * WRITE_EVERY_S
        after = _read(folder)
    finally:
        service.terminate()
        service.wait(timeout=120)
    counts = {}
    made: set[str] = set()
    for name, (count, in_c) in after.items():
        at_rest = (idle[name][0] - before.get(name, (0, ()))[0]) / idle_s if name in idle else 0.0
        share = (count - idle.get(name, (0, ()))[0] - at_rest * spent_s) / num_tokens
        if share >= LEAST_SHARE:
            counts[name] = share
            made.update(in_c)
            if name.endswith(".__init__"):
                made.add(name.removesuffix(".__init__"))
    return counts, made


def _ask(url: str, num_tokens: int) -> None:
    body: dict[str, Any] = {"prompt": "the ", "max_tokens": num_tokens, "stream": True, "seed": 1, "ignore_eos": True}
    body["num_speculative_tokens"] = 0
    with httpx2.Client(timeout=300) as client:
        body["model"] = client.get(f"{url}/v1/models").json()["data"][0]["id"]
        with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            *_, last = filter(None, answer.iter_lines())
    assert last == "data: [DONE]", last
    time.sleep(3 * WRITE_EVERY_S)


def _read(folder: str) -> dict[str, tuple[int, tuple[str, ...]]]:
    totals: Counter[str] = Counter()
    made: dict[str, set[str]] = {}
    for path in Path(folder).glob("*.json"):
        for name, (count, in_c) in json.loads(path.read_text()).items():
            totals[name] += count
            made.setdefault(name, set()).update(in_c)
    return {name: (count, tuple(sorted(made[name]))) for name, count in totals.items()}


if __name__ == "__main__":
    raise SystemExit(main())
