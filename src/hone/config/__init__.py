"""One typed, frozen configuration tree."""

from hone.config.errors import UserError

__all__ = ["UserError"]
