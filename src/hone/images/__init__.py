"""Images: read, turned into pixels by processes of their own, kept by hash. Without torch."""
