"""Lets long keys and paths in a page's running text break after a dot, underscore or slash.

On a phone they would break inside a word otherwise. Blocks of code and what can be searched stay
as they are.
"""

from __future__ import annotations

import html
import re

from hone.observe.printable import breakable

_CODE = re.compile(r"(?<!<pre>)(?<!</span>)<code>([^<]{25,})</code>")
"""Code in running text that may be too long for a line of a phone. A block begins with `<pre>`, and
a highlighted one has an empty span."""


def on_post_page(output: str, **_: object) -> str:
    """What MkDocs calls with the HTML of each page."""
    return _CODE.sub(lambda found: f"<code>{breakable(html.unescape(found[1]))}</code>", output)
