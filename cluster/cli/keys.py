"""The table of every configuration key, as it stands in ``docs/configuration.md``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from cluster.cli.flags import COMMON, flag_of
from cluster.config.base import allowed_range, choices
from cluster.config.files import config_keys

HEADING = "## Every key\n"
"""After it comes the table, to the end of the document."""


def keys_table() -> Iterator[str]:
    """Markdown lines: key, flag, default, meaning; the common keys first, then section by section."""
    keys = list(config_keys())
    titles = dict.fromkeys(["common", *(_title(path) for path, _ in keys)])
    for title in titles:
        rows = [(path, field) for path, field in keys if _title(path) == title]
        if not rows:
            continue
        yield from ("", f"### {title}", "", "| key | flag | default | meaning |", "|---|---|---|---|")
        for path, field in rows:
            default = field.get_default(call_default_factory=True)
            text = str(default).lower() if isinstance(default, bool) else default
            shown = "" if default in (None, {}, ()) else f"`{text}`"
            allowed = _short(allowed_range(field)) or " or ".join(map(str, choices(field.annotation)))
            meaning = f"{field.description}{f' ({allowed})' if allowed else ''}".replace("|", "\\|")
            yield f"| `{path}` | `{flag_of(path)}` | {shown} | {meaning} |"


def _short(allowed: str) -> str:
    """A range in few words: ``1 to 64``, ``more than 0, to 60``, ``1 or more``."""
    bounds = allowed.partition(", ")[2].replace("at least ", "").replace(" and at most ", " to ")
    if bounds.startswith("more than "):
        return bounds.replace(" to ", ", to ")
    return bounds if " to " in bounds or not bounds else f"{bounds} or more"


def _title(path: str) -> str:
    return "common" if path in COMMON else path.partition(".")[0] if "." in path else "further keys"


def main() -> None:
    """Put the table into a document in place of the one that is there, or print it."""
    text = "\n".join(keys_table())
    if len(sys.argv) < 2:
        print(text)
        return
    document = Path(sys.argv[1])
    before, heading, _ = document.read_text(encoding="utf-8").partition(HEADING)
    document.write_text(f"{before}{heading}{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
