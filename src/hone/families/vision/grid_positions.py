"""Positions of frames, rows and columns, which Qwen2.5-VL, Qwen3-VL and Qwen3.5 share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hone.model_input import ModelInput

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["GridPositions"]


class GridPositions:
    """Rule of three axes: a token of text has its position three times; the tokens of an image have
    frame, row and column, counted from the position behind the text before it. The text behind an
    image goes on after the largest position of the image."""

    num_axes = 3

    def rows(self, model_input: ModelInput, num_tokens: int) -> NDArray[np.int64]:
        """Positions [3, num_tokens]; see `hone.model_input.PositionRule`."""
        import numpy as np

        parts: list[NDArray[np.int64]] = []
        index = position = 0

        def add_text(size: int) -> None:
            nonlocal position
            parts.append(np.tile(np.arange(position, position + size, dtype=np.int64), (3, 1)))
            position += size

        for content in model_input.contents:
            if content.start >= num_tokens:
                break
            add_text(content.start - index)
            parts.append(np.indices(content.shape, dtype=np.int64).reshape(3, -1) + position)
            position += max(content.shape)
            index = content.stop
        add_text(max(num_tokens - index, 0))
        return np.concatenate(parts, axis=1)[:, :num_tokens]
