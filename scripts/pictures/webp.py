"""Join WebP pictures into an animation.

https://developers.google.com/speed/webp/docs/riff_container describes the format. Each frame is a
picture of a rectangle, which is drawn over the frames before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

HAS_ANIMATION = 2
NO_BLENDING = 2


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A picture of the part of a frame that has changed."""

    webp: bytes
    size: Sequence[int]
    """Width and height of the whole frame."""
    box: Sequence[int]
    """Left, top, width and height of the part. Left and top are even."""


def animation(frames: Sequence[Frame], milliseconds: int) -> bytes:
    """Return an animated WebP that shows each frame for a time and begins again."""
    width, height = frames[0].size
    canvas = bytes([HAS_ANIMATION, 0, 0, 0]) + _u24(width - 1) + _u24(height - 1)
    parts = [_chunk(b"VP8X", canvas), _chunk(b"ANIM", bytes(6))]
    for frame in frames:
        left, top, w, h = frame.box
        place = _u24(left // 2) + _u24(top // 2) + _u24(w - 1) + _u24(h - 1)
        head = place + _u24(milliseconds) + bytes([NO_BLENDING])
        parts.append(_chunk(b"ANMF", head + b"".join(_pictures(frame.webp))))
    return _chunk(b"RIFF", b"WEBP" + b"".join(parts))


def _pictures(webp: bytes) -> Iterable[bytes]:
    """Yield the chunks of a file that are a picture."""
    at = 12
    while at < len(webp):
        size = int.from_bytes(webp[at + 4 : at + 8], "little")
        end = at + 8 + size + size % 2
        if webp[at : at + 4] in (b"VP8 ", b"VP8L", b"ALPH"):
            yield webp[at:end]
        at = end


def _chunk(name: bytes, content: bytes) -> bytes:
    return name + len(content).to_bytes(4, "little") + content + bytes(len(content) % 2)


def _u24(number: int) -> bytes:
    return number.to_bytes(3, "little")
