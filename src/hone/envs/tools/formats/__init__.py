"""The formats in which models write calls of tools, one reader a family.

A reader never raises for a text, and takes a time that grows linearly with it: the text is whatever
a policy in training has written.

The parser of transformers (`parse_response`, for tokenizers with a `response_template`) is not
used: it raises for a whole turn where one call is malformed, ends a call at a closing mark within
one of its texts, takes quadratic time for some texts, and reward workers do not load it.
"""
