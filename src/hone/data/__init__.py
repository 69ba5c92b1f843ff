"""From rows on disk to prompts and demonstrations, in an order that survives any restart."""
