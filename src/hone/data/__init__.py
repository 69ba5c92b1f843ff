"""Data loading: rows on disk become prompts and demonstrations, in an order that a resume keeps."""
