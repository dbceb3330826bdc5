"""``GET /ui``: a page on which one sees how an answer comes about; served where the configuration has ``ui``."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse

router = APIRouter(include_in_schema=False)
_FOLDER = Path(__file__).parent.parent / "ui"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
UI_PATHS = {
    "/ui": ("index.html", "text/html"),
    "/ui/ui.js": ("ui.js", "text/javascript"),
    "/ui/ui.css": ("ui.css", "text/css"),
}
"""The page's parts: where each is, in which file, and of what kind."""


def _serve(path: str, file: str, kind: str) -> None:
    @router.get(path)
    async def part() -> FileResponse:
        return FileResponse(_FOLDER / file, media_type=kind, headers=_HEADERS)


for _path, (_file, _kind) in UI_PATHS.items():
    _serve(_path, _file, _kind)
