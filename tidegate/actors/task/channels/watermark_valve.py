"""`WatermarkValve`: event time of a task: the smallest watermark of its active channels (Flink's StatusWatermarkValve).

If all channels are idle the greatest one counts: the task waits for nobody.
A channel that ends without the last watermark holds event time where it is: nothing may be emitted too early.
"""

from __future__ import annotations

from collections.abc import Sequence

from tidegate.protocol.identity import ChannelId
from tidegate.protocol.stream_elements import MIN_WATERMARK_MS, Watermark, WatermarkStatus


class WatermarkValve:
    """Combines the watermarks of several channels into one that never goes back."""

    def __init__(self, channels: Sequence[ChannelId]) -> None:
        self._watermark_ms = dict.fromkeys(channels, MIN_WATERMARK_MS)
        self._idle: set[ChannelId] = set()
        self._emitted_ms = MIN_WATERMARK_MS
        self._all_idle = False

    @property
    def reached_ms(self) -> int | None:
        """The watermark of the task; None before its inputs had one."""
        return None if self._emitted_ms == MIN_WATERMARK_MS else self._emitted_ms

    def watermark(self, channel: ChannelId, watermark: Watermark) -> list[Watermark | WatermarkStatus]:
        """A channel's watermark advanced. A watermark that goes back is ignored."""
        if watermark.timestamp_ms > self._watermark_ms[channel]:
            self._watermark_ms[channel] = watermark.timestamp_ms
        return self._advance()

    def status(self, channel: ChannelId, status: WatermarkStatus) -> list[Watermark | WatermarkStatus]:
        """A channel became idle or active."""
        if status.idle:
            self._idle.add(channel)
        else:
            self._idle.discard(channel)
        all_idle = len(self._idle) == len(self._watermark_ms)
        changed: list[Watermark | WatermarkStatus] = []
        if all_idle != self._all_idle:
            self._all_idle = all_idle
            changed.append(WatermarkStatus(all_idle))
        advanced = self._advance()
        return advanced + changed if all_idle else changed + advanced

    def _advance(self) -> list[Watermark | WatermarkStatus]:
        active = [ms for channel, ms in self._watermark_ms.items() if channel not in self._idle]
        # If all are idle nobody is waited for: the furthest counts, in whatever order they became idle.
        reached_ms = min(active) if active else max(self._watermark_ms.values())
        if reached_ms <= self._emitted_ms:
            return []
        self._emitted_ms = reached_ms
        return [Watermark(reached_ms)]
