"""`/ui/login`: where a person gives the token to a browser, on servers that ask everybody for it."""

from __future__ import annotations

from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from tidegate.web.options import TOKEN_FILE, TOKEN_VARIABLE
from tidegate.web.security.access import Access
from tidegate.web.security.gate import LOGIN, cookie

_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>tidegate</title></head>
<body>
<h1>tidegate</h1>
<p>{message}</p>
<form method="post"><label>Token <input name="token" type="password" autocomplete="current-password" autofocus></label>
<button>Open</button></form>
</body>
</html>
"""
_ASK = f"This server asks for its token: the one in {TOKEN_VARIABLE}, or else in ~/.tidegate/{TOKEN_FILE}."
_WRONG = "That is not the token of this server."
_HEADERS = {"content-security-policy": "default-src 'none'; form-action 'self'; frame-ancestors 'none'"}


def login_routes(access: Access) -> list[Route]:
    """The form, and what takes it."""

    async def ask(request: Request) -> Response:
        return HTMLResponse(_PAGE.format(message=_ASK), headers=_HEADERS)

    async def take(request: Request) -> Response:
        form = parse_qs((await request.body()).decode("latin-1"), keep_blank_values=True)
        token = form.get("token", [""])[0].strip()
        if not access.is_token(token):
            return HTMLResponse(_PAGE.format(message=_WRONG), 403, headers=_HEADERS)
        return RedirectResponse("/", 303, headers={"set-cookie": cookie(token)})

    return [Route(LOGIN, ask, methods=["GET"]), Route(LOGIN, take, methods=["POST"])]
