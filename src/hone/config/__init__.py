"""One typed, frozen configuration tree."""
