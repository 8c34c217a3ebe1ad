"""Lets others have their turn on the event loop of a test."""

from __future__ import annotations

import asyncio


async def turn() -> None:
    """Everything that is ready runs once."""
    over = asyncio.Event()
    asyncio.get_running_loop().call_soon(over.set)
    await over.wait()
