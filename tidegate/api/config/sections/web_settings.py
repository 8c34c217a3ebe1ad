"""`WebSettings`: whether an environment shows its jobs on a page and by REST, and where."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from tidegate.api.config.sections import setting_values as of
from tidegate.api.config.sections.section import Section
from tidegate.api.config.sections.setting_names import KEYS


class WebSettings(Section):
    """Arguments of `serve_web` count more. The token is no setting: a file with it would be passed on some day."""

    web: Annotated[bool, BeforeValidator(of.switch)] = Field(default=False, alias=KEYS["web"][0])
    """Whether jobs are shown from the first `execute` on. Needs the extra `tidegate[web]`."""

    web_address: Annotated[str, BeforeValidator(of.host)] = Field(default="127.0.0.1", alias=KEYS["web_address"][0])
    """Name or address of the host to listen at. Whoever reaches another one than loopback needs the token to read."""

    web_port: Annotated[int, BeforeValidator(of.port)] = Field(default=8081, alias=KEYS["web_port"][0])
    """Port to listen at, or one of the next 16 if it is taken. 0: any that is free."""
