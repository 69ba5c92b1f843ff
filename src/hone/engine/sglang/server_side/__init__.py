"""The files that an SGLang server imports."""
