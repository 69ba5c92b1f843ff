"""Vision-language families: one file each, without torch."""
